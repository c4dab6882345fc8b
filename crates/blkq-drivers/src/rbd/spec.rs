//! The name of an RBD image: `POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`, as in Ceph's `rbd` command.

use std::ffi::CString;
use std::fmt;
use std::str::FromStr;

use blkq::{Error, ErrorKind};

/// The name of an image in a cluster, or of one of its snapshots. No part is empty or contains a slash, and only the
/// name of the pool may contain an `@`. Only parsing creates it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RbdSpec {
    pub(super) pool: String,
    /// `None`: the default namespace of the pool.
    pub(super) namespace: Option<String>,
    /// The name without the pool and the namespace.
    pub image: String,
    /// A snapshot is read-only.
    pub snapshot: Option<String>,
}

impl FromStr for RbdSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<RbdSpec, Error> {
        let invalid = |why: &str| {
            let message =
                format!("{text:?} is not an RBD image: {why}; write rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]");
            Err(Error::new(ErrorKind::Invalid, message))
        };
        let (pool, namespace, image) = match text.split('/').collect::<Vec<_>>()[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            [_] => return invalid("the pool is missing"),
            _ => return invalid("it has more than two slashes"),
        };
        let (image, snapshot) =
            image.split_once('@').map_or((image, None), |(image, name)| (image, Some(name)));
        let parts = [Some(pool), namespace, Some(image), snapshot];
        if parts.iter().flatten().any(|part| part.is_empty()) {
            return invalid("a name in it is empty");
        }
        if [namespace, snapshot].iter().flatten().any(|part| part.contains('@')) {
            return invalid("a namespace or a snapshot contains @");
        }
        if CString::new(text).is_err() {
            return invalid("it contains a zero byte");
        }
        Ok(RbdSpec {
            pool: pool.to_owned(),
            namespace: namespace.map(str::to_owned),
            image: image.to_owned(),
            snapshot: snapshot.map(str::to_owned),
        })
    }
}

impl fmt::Display for RbdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RbdSpec { pool, namespace, image, snapshot } = self;
        let part = |before: &str, name: &Option<String>, after: &str| {
            name.as_ref().map_or(String::new(), |name| format!("{before}{name}{after}"))
        };
        write!(f, "{pool}/{}{image}{}", part("", namespace, "/"), part("@", snapshot, ""))
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(text: &str) -> Option<(String, Option<String>, String, Option<String>)> {
        let RbdSpec { pool, namespace, image, snapshot } = text.parse().ok()?;
        Some((pool, namespace, image, snapshot))
    }

    #[test]
    fn the_parts_of_a_name_are_found() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(parts("p/i"), Some(("p".into(), None, "i".into(), None)));
        assert_eq!(parts("p/n/i"), Some(("p".into(), some("n"), "i".into(), None)));
        assert_eq!(parts("p/i@s"), Some(("p".into(), None, "i".into(), some("s"))));
        assert_eq!(parts("p@q/n/i@s"), Some(("p@q".into(), some("n"), "i".into(), some("s"))));
        for bad in
            ["", "i", "p/", "/i", "p//i", "p/n/", "p/@s", "p/i@", "p/i@s@t", "p/n@m/i", "a/b/c/d", "p/i\0"]
        {
            let error = bad.parse::<RbdSpec>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{bad:?}");
            assert!(error.to_string().contains("POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_name_that_parses_is_formatted_as_the_same_text(text in "[a-c@/\0. ]{0,12}|\\PC{0,12}") {
            if let Ok(spec) = text.parse::<RbdSpec>() {
                prop_assert_eq!(spec.to_string(), text);
                prop_assert!(!spec.image.contains(['@', '/']) && !spec.image.is_empty());
            }
        }

        #[test]
        fn every_combination_of_parts_parses_as_formatted(
            pool in "[^/\0]{1,8}",
            namespace in proptest::option::of("[^/@\0]{1,8}"),
            image in "[^/@\0]{1,8}",
            snapshot in proptest::option::of("[^/@\0]{1,8}"),
        ) {
            let spec = RbdSpec { pool, namespace, image, snapshot };
            prop_assert_eq!(spec.to_string().parse::<RbdSpec>().ok(), Some(spec));
        }
    }
}
