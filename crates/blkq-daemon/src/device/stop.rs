//! Stops a device: for good, or to hand it to another daemon.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use blkq::sync::lock;
use blkq_export::vhost_user::VhostUserDevice;
use blkq_protocol::failure::{Failure, Outcome};

use super::Device;
use super::running::{Running, flush_within};
use super::servers::Connected;
use crate::log;

/// How long a device that stops waits for commands that still use it.
const USERS_WAIT: Duration = Duration::from_secs(1);
/// How long the last flush before a handover may take.
const FLUSH_WAIT: Duration = Duration::from_secs(30);

impl Device {
    /// Unless `force` is set, fails if the device is in use; the error names the clients or processes, and
    /// the device keeps running. With `force`, clients are disconnected. After success there are no clients,
    /// no sockets and no block device.
    pub fn close(&self, force: bool) -> Outcome {
        let running = self.running()?;
        // Held requests must fail first: clients that are disconnected wait for them.
        let _reporting = force.then(|| running.disk.report_errors());
        if !force {
            self.check_not_held()?;
            if let clients @ 1.. = running.servers.client_count() {
                return Err(Connected(clients).unless_forced());
            }
        }
        // Clients that are disconnected wait for their I/O in flight, so limits must not delay it. If the
        // device stays, the limits apply again.
        let _unlimited = running.disk.bypass_limits();
        // Stopping the block device may take seconds, because the kernel writes back dirty pages. NBD clients
        // are disconnected before, so that they are not served meanwhile.
        let dropping = force.then(|| running.servers.begin_stop(true)).transpose()?;
        let removed = running.ublk.as_ref().map_or(Ok(()), |ublk| {
            ublk.stop(force)
                .map_err(Failure::unless_forced)
                .inspect(|()| self.has_block_device.store(false, SeqCst))
        });
        if let Some(dropping) = dropping {
            dropping.wait();
            return removed;
        }
        removed?;
        running.servers.begin_stop(running.ublk.is_some())?.wait();
        Ok(())
    }

    /// Closes everything except the block device, or the record of requests in flight that the vhost-user front end
    /// has. After this process has exited, the next daemon reissues the I/O in flight. Fails if another daemon could
    /// not continue the device; the device keeps running.
    /// Also fails if the last writes cannot be made durable; then this daemon keeps the device, but without
    /// clients.
    pub fn leave(&self) -> Outcome {
        let running = self.running()?;
        let ublk = running.ublk.as_ref();
        // The virtual machine of a device that is not a block device will connect to the next daemon.
        let guest = running.servers.vhost.as_ref().filter(|_| ublk.is_none());
        let why = match (ublk, guest) {
            (Some(ublk), _) if !ublk.is_recoverable() => {
                Some("another daemon cannot take over this block device; detach it and attach it again")
            }
            (None, Some(_)) if running.disk.driver().is_lost_with_process() => Some(
                "the daemon holds data of the image in memory, which would be lost; detach the device and attach it again",
            ),
            (None, None) => Some(
                "NBD connections cannot be handed to another daemon; detach the device, attach it again, and let clients \
                 reconnect",
            ),
            _ => None,
        };
        if let Some(why) = why {
            return Err(Failure::new(why));
        }
        // A client that connects from here on is rejected.
        let paused = if guest.is_some() { running.servers.pause_nbd() } else { running.servers.pause() };
        let _unused = paused.map_err(Connected::not_handed_over)?;
        let _unlimited = running.disk.bypass_limits();
        guest.map_or(Ok(()), VhostUserDevice::stop_for_next).map_err(|_| {
            Failure::new(
                "the front end does not track requests in flight, so the disk cannot move to another daemon; unplug the disk from the virtual machine first",
            )
        })?;
        running.servers.close();
        if let Some(ublk) = ublk {
            ublk.quiesce(&running.disk);
        }
        release(&running)
    }

    /// Flushes and stops a closed device. Fails if the flush failed or the dirty bitmaps could not be saved;
    /// the device has stopped in any case.
    pub fn stop(&self) -> Outcome {
        // The background threads may hold references to `running`.
        drop(lock(&self.background).take());
        let Some(running) = lock(&self.running).take() else { return Ok(()) };
        let _unlimited = running.disk.bypass_limits();
        let _reporting = running.disk.report_errors();
        let flushed = running.flush();
        // Dropping the last reference closes the image. A command may hold it; wait for that, because this
        // process is about to exit.
        let until = Instant::now() + USERS_WAIT;
        while Arc::strong_count(&running) > 1 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let saved = running.bitmaps.save();
        drop(running);
        flushed.map_err(|e| e.during("data may be lost")).and(saved)
    }
}

/// Releases the image, which has no clients, for the next daemon. If it cannot be released, the next daemon
/// breaks its lock or waits for it. Fails if the last writes cannot be made durable: the next daemon would
/// not know, and would answer flushes without an error.
fn release(running: &Arc<Running>) -> Outcome {
    flush_within(running, FLUSH_WAIT).inspect_err(|failure| {
        log::line(&format!("not handed to another daemon, because the last flush failed: {failure}"));
    })?;
    // If this fails, the bitmaps are inconsistent for the next daemon.
    if let Err(failure) = running.bitmaps.save_for_next() {
        log::line(&format!("warning: {failure}"));
    }
    if let Err(error) = running.disk.release() {
        log::line(&format!(
            "cannot release the image, so the next daemon opens it as after a crash: {error}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use blkq_protocol::harness::{options, scratch};

    use super::*;
    use blkq::testing::wait_until;

    // Contract: detach
    #[test]
    fn no_server_serves_while_a_forced_stop_waits_for_another() {
        let dir = scratch("servers");
        let claim = dir.claim("a").unwrap();
        let sockets = ["x", "y"].map(|name| dir.path().join(name));
        let [x, y] = sockets.each_ref().map(|path| format!("--listen=unix:{}", path.display()));
        let options = options(&["ram:1M", &x, &y, "--no-sandbox"]);
        let device = Device::open(&options, Vec::new(), &claim, Vec::new()).unwrap();
        let running = device.running().unwrap();
        let quiesced = running.disk.quiesce();
        // The first server waits for a read of its client; the client of the second server is idle.
        let [mut busy, mut idle] = sockets.each_ref().map(|path| {
            let mut client = UnixStream::connect(path).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            client.write_all(&[&3_u32.to_be_bytes()[..], b"IHAVEOPT\0\0\0\x01\0\0\0\x01a"].concat()).unwrap();
            client.read_exact(&mut [0; 28]).unwrap();
            client
        });
        let read = [&b"\x25\x60\x95\x13"[..], &[0; 20], &512_u32.to_be_bytes()].concat();
        busy.write_all(&read).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while running.servers.connections().all(|client| client.in_flight == 0) {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        std::thread::scope(|scope| {
            let stop = scope.spawn(|| device.close(true));
            assert_eq!(idle.read(&mut [0]).unwrap(), 0, "disconnected while the other client is waited for");
            assert!(!stop.is_finished());
            drop(quiesced);
            stop.join().unwrap().unwrap();
        });
        drop(running);
        device.stop().unwrap();
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_device_stops_when_no_command_uses_it() {
        let dir = scratch("users");
        let claim = dir.claim("a").unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox"]);
        let device = Device::open(&options, Vec::new(), &claim, Vec::new()).unwrap();
        device.close(true).unwrap();
        let used = device.running().unwrap();
        let disk = Arc::downgrade(&used.disk);
        std::thread::scope(|scope| {
            let device = &device;
            scope.spawn(move || {
                wait_until("the device stops", || device.running.lock().unwrap().is_none());
                drop(used);
            });
            device.stop().unwrap();
            assert!(disk.upgrade().is_none(), "the image is closed");
        });
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
