//! Counters of an export. Each is declared once, with its texts: sums, differences, JSON, metrics and the rows of a
//! report follow from the declaration.

/// The number of rows in which a report shows the counters of an export.
pub const COUNTER_ROWS: usize = 3;

/// A counter with its texts.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// The name in JSON and, with a prefix, in metrics.
    pub name: &'static str,
    /// The description in metrics.
    pub help: &'static str,
    /// The row of the export in a report, below [`COUNTER_ROWS`], and the text after the number.
    /// `None` if the counter is shown elsewhere.
    pub row: Option<(usize, &'static str)>,
    /// The count.
    pub value: u64,
}

/// Declares the counters of an export as two structs: plain numbers, and atomics ("published") which
/// one thread stores and others load. The module must have `AtomicU64` and `Relaxed` in scope.
macro_rules! counters {
    (
        $(#[$doc:meta])*
        pub struct $Counters:ident, published as $Published:ident {
            $($(#[$about:meta])* $name:ident: $help:literal $(, row $row:literal $label:literal)?;)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $Counters {
            $($(#[$about])* pub $name: u64,)*
        }

        const _: () = {
            $($(assert!($row < $crate::counters::COUNTER_ROWS, "a report has no such row");)?)*
        };

        impl $Counters {
            /// The counters minus those of `earlier`, an earlier state of the same servers.
            #[must_use]
            pub fn since(&self, earlier: &$Counters) -> $Counters {
                $Counters { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }

            /// All counters, in the order of their declaration.
            pub fn each(&self) -> impl Iterator<Item = $crate::counters::Counted> {
                [$($crate::counters::Counted {
                    name: stringify!($name),
                    help: $help,
                    row: None$(.or(Some(($row, $label))))?,
                    value: self.$name,
                },)*]
                .into_iter()
            }
        }

        impl std::ops::AddAssign for $Counters {
            fn add_assign(&mut self, other: $Counters) {
                $(self.$name += other.$name;)*
            }
        }

        /// The counters as one thread stores them for others. Relaxed accesses suffice, as each counter is
        /// read on its own.
        #[derive(Default)]
        struct $Published {
            $($name: AtomicU64,)*
        }

        impl $Published {
            fn store(&self, counters: &$Counters) {
                $(self.$name.store(counters.$name, Relaxed);)*
            }

            fn load(&self) -> $Counters {
                $Counters { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

pub(crate) use counters;
