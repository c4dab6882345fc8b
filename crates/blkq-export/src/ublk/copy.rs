//! How the data of a request moves between the pages of the kernel's request and the driver of the disk.

use std::fmt;

use blkq::{Error, ErrorKind, QueueLimits};

use super::abi::Features;

/// Which side copies the data of a device's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyMode {
    /// The kernel copies between the pages and a buffer that each tag has: the data of a write before the
    /// server gets the request, the data of a read when the server completes it.
    Kernel,
    /// This process copies through the character device, with buffers only for requests in flight.
    User,
    /// Neither side copies: the driver does its I/O on the pages of the request (Linux 6.16).
    None,
}

impl CopyMode {
    /// The name of the mode in messages, and how it treats the data.
    fn texts(self) -> (&'static str, &'static str) {
        match self {
            CopyMode::Kernel => ("kernel", "copied by the kernel"),
            CopyMode::User => ("user", "copied by the daemon"),
            CopyMode::None => ("none", "not copied"),
        }
    }

    /// With [`CopyMode::None`], too, this process copies requests whose pages the kernel cannot register.
    pub(super) fn features(self) -> Features {
        match self {
            CopyMode::Kernel => Features::empty(),
            CopyMode::User => Features::USER_COPY,
            CopyMode::None => Features::AUTO_BUF_REG | Features::USER_COPY,
        }
    }

    pub(super) fn of(features: Features) -> CopyMode {
        if features.contains(Features::AUTO_BUF_REG) {
            CopyMode::None
        } else if features.contains(Features::USER_COPY) {
            CopyMode::User
        } else {
            CopyMode::Kernel
        }
    }

    /// Chooses the mode for a disk with `limits`: `wanted`, or the best one, with the reason if that is not
    /// [`CopyMode::None`]. `privileged`: this process has CAP_SYS_ADMIN. `buffers`: the rings of all queues
    /// have room for the pages of all tags. Fails with [`ErrorKind::Unsupported`] if the mode `wanted` is
    /// impossible.
    pub(super) fn choose(
        wanted: Option<CopyMode>,
        kernel: Features,
        privileged: bool,
        buffers: bool,
        limits: &QueueLimits,
    ) -> Result<(CopyMode, Option<&'static str>), Error> {
        let obstacle = |mode: CopyMode| match mode {
            CopyMode::Kernel => None,
            _ if !privileged => Some("only root may use the copy modes user and none"),
            CopyMode::User => None,
            CopyMode::None if !kernel.contains(Features::AUTO_BUF_REG) => {
                Some("this kernel's ublk cannot register the pages of requests (Linux 6.16 and newer can)")
            }
            CopyMode::None if !limits.kernel_pages => {
                Some("the driver processes the data in memory, which needs a copy")
            }
            CopyMode::None if !buffers => Some(
                "the ring has no table of registered buffers, because the memory or the limit of locked memory is too small",
            ),
            CopyMode::None => None,
        };
        let mode = wanted.unwrap_or(CopyMode::None);
        match obstacle(mode) {
            None => Ok((mode, None)),
            why if wanted.is_none() => Ok((CopyMode::Kernel, why)),
            Some(why) => {
                Err(Error::new(ErrorKind::Unsupported, format!("copy mode {}: {why}", mode.texts().0)))
            }
        }
    }
}

impl fmt::Display for CopyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.texts().1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_mode_that_kernel_user_and_driver_allow_is_chosen() {
        let file = QueueLimits { kernel_pages: true, ..QueueLimits::default() };
        let memory = QueueLimits::default();
        let (old, new) = (Features::USER_COPY, Features::USER_COPY | Features::AUTO_BUF_REG);
        let choose = |wanted, kernel, privileged, limits| {
            CopyMode::choose(wanted, kernel, privileged, true, limits).map_err(|e| e.to_string())
        };
        let best = |kernel, privileged, limits| {
            let (mode, why) = choose(None, kernel, privileged, limits).unwrap();
            assert_eq!(why.is_none(), mode == CopyMode::None, "{why:?}");
            mode
        };
        assert_eq!(best(new, true, &file), CopyMode::None);
        assert_eq!(best(old, true, &file), CopyMode::Kernel);
        assert_eq!(best(new, false, &file), CopyMode::Kernel);
        assert_eq!(best(new, true, &memory), CopyMode::Kernel);
        for mode in [CopyMode::Kernel, CopyMode::User, CopyMode::None] {
            assert_eq!(choose(Some(mode), new, true, &file), Ok((mode, None)));
            assert_eq!(CopyMode::of(mode.features()), mode);
        }
        for (kernel, privileged, limits, why) in
            [(old, true, &file, "6.16"), (new, false, &file, "root"), (new, true, &memory, "driver")]
        {
            let refused = choose(Some(CopyMode::None), kernel, privileged, limits).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        assert!(choose(Some(CopyMode::User), new, false, &file).is_err());
        assert_eq!(choose(Some(CopyMode::Kernel), old, false, &memory), Ok((CopyMode::Kernel, None)));
    }

    #[test]
    fn without_registered_buffers_the_kernel_copies_with_a_reason() {
        let file = QueueLimits { kernel_pages: true, ..QueueLimits::default() };
        let kernel = Features::USER_COPY | Features::AUTO_BUF_REG;
        let choose = |wanted| CopyMode::choose(wanted, kernel, true, false, &file);
        let (mode, why) = choose(None).unwrap();
        assert_eq!(mode, CopyMode::Kernel);
        assert!(why.unwrap().contains("locked memory"));
        let refused = choose(Some(CopyMode::None)).unwrap_err().to_string();
        assert!(
            refused.starts_with("copy mode none: the ring has no table of registered buffers"),
            "{refused}"
        );
        for mode in [CopyMode::Kernel, CopyMode::User] {
            assert_eq!(choose(Some(mode)).unwrap(), (mode, None));
        }
    }
}
