//! `blkq snapshot`: devices go on in new images, and what they had stays as it was.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use blkq::drivers::DriverSpec;

use super::attach::create::{NewImage, directory_of};
use crate::completion;
use crate::control::{Dialogue, Request, ask};
use crate::devices::named;
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::options::{AttachOptions, Backing, Format, Record};
use crate::state::StateDir;
use crate::{complain, print};

/// Options of `snapshot`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
The image that a device has stays as it is from then on: what is written goes to a new qcow2 image,
which reads from the other what was not written yet. Clients notice a pause. Several devices are
stopped together, so that their snapshots are of one moment; if one cannot be, none is.
From then on attach the new image, with --format qcow2, and do not write to the old one.

Examples:
  blkq snapshot disk.img --to disk.2.qcow2
  blkq snapshot data=data.2.qcow2 log=log.2.qcow2")]
pub struct Args {
    /// The device: its name, its image, its URI or its node in /dev; or several as DEVICE=FILE
    #[arg(required = true, value_name = "DEVICE[=FILE]", add = completion::devices())]
    devices: Vec<String>,
    /// The new image of the one device, which must not be there yet
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// The backing files that an image may name: allow admits a new one in another directory than that of
    /// the image behind it
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory")]
    backing_chain: Backing,
}

/// A device, and the image that it is to get.
struct Wanted {
    name: String,
    image: String,
    path: PathBuf,
    options: Record,
}

/// One that waits for the others.
struct Prepared<'a> {
    wanted: &'a Wanted,
    dialogue: Dialogue,
    file: NewImage,
}

impl Args {
    /// Makes the snapshots, and prints the new images.
    ///
    /// # Errors
    /// The device that has none, and why.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let mut wanted = Vec::new();
        for (device, file) in self.pairs()? {
            let of = |e: Failure| e.during(format_args!("snapshot {device}"));
            wanted.push(self.wanted(&dir, &device, &file).map_err(of)?);
        }
        // Two commands that stop the same devices do it in one order.
        wanted.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(twice) = wanted.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(Failure::new(format!("snapshot {}: it is named twice; name it once", twice[0].name)));
        }
        let prepare = |wanted| prepare(&dir, wanted);
        // If one fails the others are dropped: they go on as they were, and their files are removed.
        let prepared = wanted.iter().map(prepare).collect::<Outcome<Vec<_>>>()?;
        let mut failures = Vec::new();
        for Prepared { wanted, dialogue, file } in prepared {
            let done = dialogue.step(None);
            match &done {
                Ok(Err(_)) => drop(file),
                // Without a reply it may be the image by now.
                Ok(Ok(())) | Err(_) => file.keep(),
            }
            match done.and_then(|done| done) {
                Ok(()) => print(&format!("{}\n", wanted.path.display()))?,
                Err(failure) => failures.push(failure.during(format_args!("snapshot {}", wanted.name))),
            }
        }
        let last = failures.pop();
        failures.iter().for_each(complain);
        last.map_or(Ok(()), Err)
    }

    /// The devices as they were named, and the new images.
    fn pairs(&self) -> Outcome<Vec<(String, PathBuf)>> {
        if let Some(file) = &self.to {
            return match &self.devices[..] {
                [device] => Ok(vec![(device.clone(), file.clone())]),
                _ => Err(Failure::new("snapshot: --to is for one device; name several as DEVICE=FILE")),
            };
        }
        let pair = |device: &String| match device.rsplit_once('=') {
            Some((device, file)) if !device.is_empty() && !file.is_empty() => {
                Ok((device.to_owned(), PathBuf::from(file)))
            }
            _ => Err(Failure::new(format!(
                "snapshot {device}: there is no new image; give it with --to FILE, or as DEVICE=FILE"
            ))),
        };
        self.devices.iter().map(pair).collect()
    }

    fn wanted(&self, dir: &StateDir, device: &str, file: &Path) -> Outcome<Wanted> {
        let name = named(dir, device)?;
        let info: DeviceInfo = ask(dir, &name, &Request::Show {})?;
        let options = info.attach_options.as_ref().map(Record::read).transpose()?;
        let Some(options) = options else {
            return Err(Failure::new("its daemon is of an older blkq; detach it, and attach it again"));
        };
        let (Some(last), DriverSpec::Image(_)) = (file.file_name(), &options.image) else {
            return Err(Failure::new(format!(
                "{} is no image that another could have behind it",
                info.image
            )));
        };
        if options.fault.is_some() {
            return Err(Failure::new("its faults are those of one image; attach it without --fault"));
        }
        let directory = directory_of(file)
            .canonicalize()
            .map_err(|e| Failure::new(format!("{}: {e}", directory_of(file).display())))?;
        let path = directory.join(last);
        if self.backing_chain == Backing::OwnDirectory && !Path::new(&info.image).starts_with(&directory) {
            return Err(Failure::new(format!(
                "{} is not in the directory of {}; choose another, or allow it with --backing-chain allow",
                info.image,
                path.display()
            )));
        }
        let backing_chain = match self.backing_chain {
            Backing::OwnDirectory => options.backing_chain,
            Backing::Allow => Backing::Allow,
        };
        let options = AttachOptions {
            image: DriverSpec::Image(path.clone()),
            format: Some(Format::Qcow2),
            backing_chain,
            ..options
        };
        options.check()?;
        Ok(Wanted { name, image: info.image, path, options: Record::new(&options)? })
    }
}

/// Makes the new image of a device, which waits with all I/O from then on.
fn prepare<'a>(dir: &StateDir, wanted: &'a Wanted) -> Outcome<Prepared<'a>> {
    let Wanted { name, image, path, options } = wanted;
    let of = |e: Failure| e.during(format_args!("snapshot {name}"));
    let there =
        format!("{} is there already, and nothing is overwritten; choose another name", path.display());
    let file = NewImage::make(path, &there, |_| Ok(())).map_err(of)?;
    let dialogue = Dialogue::begin(dir, name, &Request::Snapshot { options: options.clone() }).map_err(of)?;
    dialogue.step(file.file().map(AsFd::as_fd)).and_then(|done| done).map_err(|e| of(e.during(image)))?;
    Ok(Prepared { wanted, dialogue, file })
}
