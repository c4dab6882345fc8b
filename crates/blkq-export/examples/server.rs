//! An NBD server as part of a program: serves 64 MiB of memory until its standard input is closed.
//! `cargo run -p blkq-export --example server -- /tmp/scratch.sock`

use std::io::Read;

use blkq::drivers::ram::Ram;
use blkq::{Disk, EngineThread, StatGroup};
use blkq_export::Listen;
use blkq_export::nbd::{NbdExport, NbdOptions, NbdServer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = std::env::args().nth(1).ok_or("usage: server SOCKET")?;

    // Any driver can be used: `blkq_drivers::open` opens an image by its name.
    let disk = Disk::builder(Box::new(Ram::new(64 << 20, 4096, false)?)).build()?;
    let engine = EngineThread::spawn("queue-0", vec![(disk.clone(), 0)])?;

    let export = NbdExport { name: "scratch".into(), description: "in memory".into(), queue: 0 };
    let options = NbdOptions { exports: vec![export], ..NbdOptions::default() };
    let server = NbdServer::start(Listen::Unix(socket.into()), options, &[engine.handle().clone()])?;
    println!("{}", server.uri());

    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop(true)?;
    let writes = disk.stats()[StatGroup::Write].ios;
    println!("{writes} writes");
    Ok(())
}
