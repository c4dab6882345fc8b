//! Exchanges the driver of a device while clients use it: the data stays the same, and the declared limits change.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use blkq::{Change, Driver, DriverQueue, DriverSetting, Error, ErrorKind, Extent, OpenContext, QueueLimits};
use blkq_simulation as simulation;

use super::change::may_be_busy;
use super::life::World;

/// The first driver of a device, which declares FUA only if `has_fua` is set.
struct Declared {
    inner: Arc<dyn Driver>,
    has_fua: bool,
}

impl Driver for Declared {
    fn name(&self) -> &'static str {
        "declared"
    }

    fn limits(&self) -> QueueLimits {
        let limits = self.inner.limits();
        QueueLimits { fua: limits.fua && self.has_fua, ..limits }
    }

    fn uses_ring(&self) -> bool {
        self.inner.uses_ring()
    }

    fn queues_max(&self) -> usize {
        self.inner.queues_max()
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        self.inner.open_queue(cx)
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        self.inner.extents(range, max)
    }

    fn prepare_set(&self, setting: &dyn DriverSetting) -> Result<Change, Error> {
        self.inner.prepare_set(setting)
    }

    fn set(&self, setting: &dyn DriverSetting) -> Result<(), Error> {
        self.inner.set(setting)
    }

    fn prepare_read_only(&self, read_only: bool) -> Result<(), Error> {
        self.inner.prepare_read_only(read_only)
    }

    fn set_read_only(&self, read_only: bool) -> Result<(), Error> {
        self.inner.set_read_only(read_only)
    }

    fn prepare_resize(&self, bytes: Option<u64>) -> Result<u64, Error> {
        self.inner.prepare_resize(bytes)
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.inner.resize(bytes)
    }
}

/// Exchanges the driver at random, in a world with exchanges.
pub fn by_chance(world: &Rc<RefCell<World>>) {
    let is_due = {
        let World { worlds, extra, .. } = &mut *world.borrow_mut();
        worlds.exchanges && extra.one_in(15)
    };
    if is_due {
        exchange(world);
    }
}

/// Exchanges the driver for one that declares FUA or does not, while the world keeps running. The block layer asserts
/// that no request has a flag that its driver does not declare.
fn exchange(world: &Rc<RefCell<World>>) {
    let (disk, driver) = {
        let mut world = world.borrow_mut();
        world.common.tick();
        let has_fua = world.extra.one_in(2);
        let inner = world.server.as_ref().expect("a life has a server").first_driver.clone();
        (world.disk(), Declared { inner, has_fua })
    };
    let begun_ns = simulation::time_ns();
    let replaced = disk.begin_exchange().and_then(|exchange| exchange.replace(Arc::new(driver)));
    let mut world = world.borrow_mut();
    let may_be_busy = may_be_busy(&world, begun_ns);
    let World { common, seen, .. } = &mut *world;
    common.tick();
    match replaced {
        Ok(_) => seen.exchanges += 1,
        Err(error) => {
            let may_be = match error.kind() {
                ErrorKind::Busy => may_be_busy,
                ErrorKind::Held => common.holding.is_some(),
                _ => false,
            };
            assert!(may_be, "an exchange is rejected: {error}");
        }
    }
}
