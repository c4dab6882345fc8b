//! A virtual machine's disk inside of a program: serves a device by vhost-user-blk until its standard input
//! closes. `cargo run -p blkq-export --example vhost_user -- /tmp/disk.vhost disk.img 2`, and then
//! `qemu-system-x86_64 -object memory-backend-memfd,id=m,size=1G,share=on -M q35,memory-backend=m -m 1G
//! -chardev socket,id=c,path=/tmp/disk.vhost -device vhost-user-blk-pci,chardev=c ...`

use std::io::Read;

use blkq::{Disk, EngineThread, StatGroup};
use blkq_drivers::{DriverOptions, open};
use blkq_export::Listen;
use blkq_export::vhost_user::{VhostUserDevice, VhostUserOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(device)) = (arguments.next(), arguments.next()) else {
        return Err("usage: vhost_user SOCKET DEVICE [QUEUES]".into());
    };
    let queues = arguments.next().map_or(Ok(1), |queues| queues.parse())?;

    // An engine for each queue of the disk: queue i of the guest goes to engine i, modulo their number.
    let opened = open(&device.parse()?, &DriverOptions::default())?;
    let disk = Disk::builder_shared(opened.driver).queues(queues).build()?;
    let engine = |queue| EngineThread::spawn(&format!("queue-{queue}"), vec![(disk.clone(), queue)]);
    let engines = (0..queues).map(engine).collect::<Result<Vec<_>, _>>()?;
    let handles: Vec<_> = engines.iter().map(|engine| engine.handle().clone()).collect();

    let options = VhostUserOptions { serial: "example".into(), ..VhostUserOptions::default() };
    let server = VhostUserDevice::listen(Listen::Unix(socket.into()), options, &disk, &handles)?;
    server.serve()?;
    println!("{}", server.uri());

    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop(true)?;
    let writes = disk.stats()[StatGroup::Write].ios;
    println!("{writes} writes");
    Ok(())
}
