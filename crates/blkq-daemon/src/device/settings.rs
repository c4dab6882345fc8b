//! Changes settings of a device in use. A new setting needs an arm in [`apply`] and in [`LiveSettings::read_back`], and
//! one in [`check_change`] only if it has a rule that depends on the device.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, Mutex};

use blkq::sync::lock;
use blkq::throttle::{Ceiling, LimitMode};
use blkq::{Disk, DriverSetting, ErrorKind};
use blkq_drivers::r#loop::LoopSetting;
use blkq_export::nbd::NbdSwitches;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{Key, Mechanism, Setting, Without};

use super::background::BackgroundThreads;
use super::running::{Running, stopping};
use super::saved_settings::DeviceSettings;

/// The name and value of a fact with which a driver describes itself.
pub(super) type Fact = (&'static str, String);

/// The settings of a device in use that are not those of its disk: the daemon implements them.
pub(super) struct LiveSettings {
    /// `None` once the device has stopped.
    pub(super) threads: Mutex<Option<BackgroundThreads>>,
    pub(super) saved: DeviceSettings,
    /// Whether the device detaches with its last client, as a loop device with `LO_FLAGS_AUTOCLEAR` does. Only clients
    /// that disconnect after it was set count.
    pub(super) autoclear: AtomicBool,
}

impl LiveSettings {
    /// The address of the metrics, if they are served.
    pub(super) fn metrics_uri(&self) -> Option<String> {
        Some(lock(&self.threads).as_ref()?.metrics.as_ref()?.uri.clone())
    }

    /// Passes the threads to `change`. Fails if the device has stopped.
    pub(super) fn with_threads<T>(
        &self,
        change: impl FnOnce(&mut BackgroundThreads) -> Outcome<T>,
    ) -> Outcome<T> {
        change(lock(&self.threads).as_mut().ok_or_else(stopping)?)
    }

    /// The value that is in force; `None` if there is none, for example the weight of a device without a group.
    /// `facts` are those of the driver.
    #[deny(clippy::wildcard_enum_match_arm, reason = "a new setting needs an arm")]
    pub(super) fn read_back(&self, running: &Running, facts: &[Fact], key: Key) -> Option<Setting> {
        let disk = &running.disk;
        let now = disk.settings();
        let fact = |name| facts.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str());
        Some(match key {
            Key::Autoclear => Setting::Autoclear(self.autoclear.load(SeqCst)),
            Key::Batching => Setting::Batching(now.batching),
            Key::Clock => Setting::Clock(now.clock),
            Key::Depth => Setting::Depth(now.depth),
            Key::DirectIo => Setting::DirectIo(fact("direct-io-requested")?.parse().ok()?),
            Key::Dispatch => Setting::Dispatch(fact("dispatch")?.parse().ok()?),
            Key::Fault => Setting::Fault(fact("fault")?.parse().ok()?),
            Key::Group => Setting::Group(Some(running.group_name()?)),
            Key::HangWarning => Setting::HangWarning(running.hangs.limit()),
            Key::Iostats => Setting::Iostats(now.iostats),
            Key::Limit => Setting::Limit(match disk.ceiling() {
                Ceiling::NotSearched => LimitMode::Fixed(disk.rate_limits()),
                Ceiling::Unknown | Ceiling::Found(_) => LimitMode::Auto,
            }),
            Key::Merge => Setting::Merge(now.merge),
            Key::OnError => Setting::OnError(disk.error_policy()),
            Key::ReadOnly => Setting::ReadOnly(disk.limits().read_only),
            Key::Scheduler => Setting::Scheduler(now.scheduler),
            Key::Weight => Setting::Weight(disk.group_member()?.weight()),
            Key::Without => Setting::Without(without(running)),
        })
    }
}

/// Checks the rules that depend on the device and not on the value alone.
pub(super) fn check_change(running: &Running, setting: &Setting) -> Outcome {
    let refused = |rule: &str| Err(Failure::new(rule));
    match setting {
        Setting::Limit(LimitMode::Auto) if running.disk.group_member().is_some() => {
            refused("limit=auto is not possible for a device in a group")
        }
        // `blkq set` sends another request to join a group, with the file of the group.
        Setting::Group(Some(group)) => {
            let name = running.disk.name();
            refused(&format!("only `blkq set {name} group={group}` can change the group"))
        }
        Setting::Depth(depth) => check_depth(&running.disk, *depth),
        Setting::ReadOnly(_) => running.changes.check_no_commit(),
        _ => Ok(()),
    }
}

/// Changes the setting of the disk, or of the device that serves it. There is no device before the disk is in use; the
/// settings that the daemon implements are then options. Fails if the disk or the device rejects the value.
#[deny(clippy::wildcard_enum_match_arm, reason = "a new setting needs an arm")]
pub(super) fn apply(
    disk: &Arc<Disk>,
    device: Option<(&LiveSettings, &Running)>,
    setting: &Setting,
) -> Outcome {
    let of_disk = |setting| disk.set(setting).map_err(not_set);
    let of_driver = |setting: &dyn DriverSetting| disk.set_driver(setting).map_err(not_set);
    let of_device = |set: &dyn Fn(&LiveSettings, &Running) -> Outcome| {
        device.map_or(Ok(()), |(live, running)| set(live, running))
    };
    let of_threads = |set: &dyn Fn(&mut BackgroundThreads, &Running) -> Outcome| {
        of_device(&|live, running| live.with_threads(|threads| set(threads, running)))
    };
    match setting {
        Setting::Autoclear(on) => of_device(&|live, running| {
            running.ublk.as_ref().map_or(Ok(()), |ublk| ublk.watch_users(*on))?;
            live.autoclear.store(*on, SeqCst);
            Ok(())
        }),
        Setting::Batching(on) => of_disk(blkq::Setting::Batching(*on)),
        Setting::Clock(mode) => of_disk(blkq::Setting::Clock(*mode)),
        Setting::Depth(depth) => {
            check_depth(disk, *depth)?;
            of_disk(blkq::Setting::Depth(*depth))
        }
        Setting::DirectIo(mode) => of_driver(&LoopSetting::DirectIo(*mode)),
        Setting::Dispatch(dispatch) => of_driver(&LoopSetting::Dispatch(*dispatch)),
        Setting::Fault(spec) => of_driver(spec),
        // `join_group` has the file of the group.
        Setting::Group(Some(_)) => Ok(()),
        Setting::Group(None) => of_threads(&|threads, running| {
            threads.leave_group(running);
            Ok(())
        }),
        Setting::HangWarning(limit) => of_threads(&|threads, _| {
            threads.hangs.set(*limit);
            Ok(())
        }),
        Setting::Iostats(on) => of_disk(blkq::Setting::Iostats(*on)),
        Setting::Limit(mode) => of_threads(&|threads, _| threads.set_limit(disk, *mode)),
        Setting::Merge(on) => of_disk(blkq::Setting::Merge(*on)),
        Setting::OnError(policy) => {
            disk.set_error_policy(*policy);
            Ok(())
        }
        Setting::ReadOnly(on) => {
            let was = disk.limits().read_only;
            of_disk(blkq::Setting::ReadOnly(*on))?;
            of_device(&|_, running| {
                let Some(ublk) = &running.ublk else { return Ok(()) };
                ublk.set_read_only(*on).map_err(|error| {
                    // The error of the block device is the reason for the failure.
                    let _ = disk.set(blkq::Setting::ReadOnly(was));
                    Failure::of(error, ErrorKind::Unsupported, "detach the device and attach it again")
                })
            })
        }
        Setting::Scheduler(kind) => of_disk(blkq::Setting::Scheduler(*kind)),
        Setting::Weight(weight) => {
            let set = disk.group_member().map_or(Ok(()), |member| member.set_weight(*weight));
            set.map_err(not_set)
        }
        Setting::Without(without) => of_device(&|_, running| {
            let on = |mechanism| !without.includes(mechanism);
            // Only this change waits for the I/O in flight, which may be held or hang.
            let early_submission = on(Mechanism::EarlySubmission);
            if disk.settings().early_submission != early_submission {
                of_disk(blkq::Setting::EarlySubmission(early_submission))?;
            }
            blkq::set_huge_pages(on(Mechanism::HugePages));
            let NbdSwitches { receive_backoff, split_reads } = &*running.servers.switches;
            receive_backoff.store(on(Mechanism::ReceiveBackoff), Relaxed);
            split_reads.store(on(Mechanism::SplitReads), Relaxed);
            Ok(())
        }),
    }
}

/// The mechanisms that are switched off now.
pub(super) fn without(running: &Running) -> Without {
    let NbdSwitches { receive_backoff, split_reads } = &*running.servers.switches;
    let mut without = Without::default();
    without.switch(Mechanism::EarlySubmission, running.disk.settings().early_submission);
    without.switch(Mechanism::HugePages, blkq::has_huge_pages());
    without.switch(Mechanism::ReceiveBackoff, receive_backoff.load(Relaxed));
    without.switch(Mechanism::SplitReads, split_reads.load(Relaxed));
    without
}

pub struct Change {
    pub to: Setting,
    pub(super) from: Option<Setting>,
    /// The value in the state file, if the setting was changed before.
    pub(super) saved: Option<(String, String)>,
}

/// Rejects a depth that exceeds the depth with which the disk was attached. The error names the largest
/// depth.
fn check_depth(disk: &Disk, depth: u16) -> Outcome {
    if depth <= disk.depth_max() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "depth must be 1 to {}, not {depth}; to use {depth}, detach the device and attach it with --depth {depth}",
        disk.depth_max()
    )))
}

fn not_set(error: blkq::Error) -> Failure {
    Failure::of(error, ErrorKind::Lost, "detach the device and attach it again")
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use blkq_protocol::control::{BitmapChange, NewSize};
    use blkq_protocol::group::GroupFile;
    use blkq_protocol::harness::{options, scratch};
    use blkq_protocol::options::AttachOptions;
    use blkq_protocol::state::{Claim, parse_state};

    use super::super::image::Opening;
    use super::super::listen::Sockets;
    use super::super::open::Plan;
    use super::super::running::Served;
    use super::*;

    fn plan<'a>(
        options: &AttachOptions,
        claim: &'a Claim,
        settings: Vec<(String, String)>,
        is_take_over: bool,
    ) -> Plan<'a> {
        Plan {
            options: options.clone(),
            claim,
            sockets: Sockets::default(),
            opening: Opening { device_bytes: is_take_over.then_some(1 << 20), ..Opening::default() },
            served: Served { image: String::new(), number: 0, attach_options: None },
            block_device: None,
            settings,
        }
    }

    /// The file was written by an older version, whose daemons stored settings as the user had typed them.
    #[test]
    fn settings_of_older_state_files_are_in_force_again() {
        let dir = scratch("saved");
        dir.create().unwrap();
        let image = dir.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let words = [image.to_str().unwrap(), "--export", "nbd", "--no-sandbox", "--fault", "none"];
        let options = options(&words);
        let mut saved = parse_state(include_bytes!("../../tests/data/state-settings.json")).unwrap().settings;
        assert!(saved.iter().any(|(key, _)| key == "pacing"));
        // Switches of earlier versions are restored by other names, and a removed one is dropped without a warning.
        saved = Without::default().translate(&saved);
        assert!(saved.contains(&("without".to_owned(), "receive-backoff,split-reads".to_owned())));
        let claim = dir.claim("saved").unwrap();
        let device = plan(&options, &claim, saved.clone(), true).serve().unwrap();
        let info = device.info().unwrap();
        let now = |key: &str| {
            let all = info.settings.iter().chain(&info.driver_facts);
            all.filter(|(other, _)| other == key).map(|(_, value)| value.as_str()).next()
        };
        let running = device.running().unwrap();
        for (key, value) in &saved {
            let value = value.as_str();
            match key.as_str() {
                "autoclear" => assert!(info.autoclear),
                "read-only" => assert!(info.read_only),
                "direct-io" => assert_eq!(info.direct_io.requested, value),
                "colour" | "depth-of-sea" | "scheduler-of-old" => {
                    let warning = format!("cannot restore the setting {key}={value}: no such setting");
                    assert!(
                        info.warnings.iter().any(|line| line.starts_with(&warning)),
                        "{:?}",
                        info.warnings
                    );
                }
                _ => assert_eq!(now(key), Some(value), "{key}"),
            }
        }
        let warned = info.warnings.iter().filter(|line| line.contains("cannot restore the setting")).count();
        assert_eq!(warned, 3, "{:?}", info.warnings);
        // The state file still has the settings that this daemon did not understand, and gets those that are
        // set from now on.
        assert_eq!(device.state().unwrap().settings, saved);
        let depth = device.read_setting("depth", "16").unwrap();
        let refuse = || {
            assert!(running.changes.is_changing(), "no other change can begin");
            Err(Failure::new("the client exited"))
        };
        let clear = BitmapChange::Clear { name: "b".to_owned() };
        for refused in [
            device.set(&depth, &refuse),
            device.resize(NewSize::Bytes(512), true, None, &refuse).map(drop),
            device.change_bitmap(&clear, &refuse),
            device.join_group("g", File::open("/dev/null").unwrap(), &refuse),
        ] {
            assert_eq!(refused, Err(Failure::new("the client exited")));
        }
        assert_eq!(device.state().unwrap().settings, saved);
        device.set(&depth, &|| Ok(())).unwrap();
        let mut settings = device.state().unwrap().settings;
        assert_eq!(settings.pop(), Some(("depth".to_owned(), "16".to_owned())));
        assert!(saved.iter().filter(|(key, _)| key != "depth").eq(&settings));

        drop(running);
        device.close(true).unwrap();
        device.stop().unwrap();
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_successor_whose_group_is_damaged_serves_without_it() {
        let dir = scratch("groupless");
        dir.create().unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox", "--group", "g"]);
        let claim = dir.claim("groupless").unwrap();
        let serve = |is_successor| plan(&options, &claim, Vec::new(), is_successor).serve();
        // In the first round the group does not exist; in the second its file is empty.
        for why in ["there is no group g", "group g is damaged"] {
            assert!(serve(false).err().unwrap().to_string().starts_with(why));
            let device = serve(true).unwrap();
            let info = device.info().unwrap();
            assert!(info.warnings.iter().any(|line| line.contains(why)), "{:?}", info.warnings);
            assert!(info.settings.iter().all(|(key, _)| key != "group"), "{:?}", info.settings);
            device.close(true).unwrap();
            device.stop().unwrap();
            GroupFile::set(&dir, "g", &"iops=10".parse().unwrap()).unwrap();
            std::fs::File::options()
                .write(true)
                .open(dir.path().join("groups/g"))
                .unwrap()
                .set_len(0)
                .unwrap();
        }
        drop(claim);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
