//! The macro that declares the options of `attach` together with the settings of `blkq set`.

/// Declares [`AttachOptions`](super::AttachOptions) and the table of settings.
///
/// An option that `blkq set` can change is followed by its row of the table:
/// `=> "name" Variant(type of the value) for scope by implementer as syntax of the value`.
macro_rules! attach_options {
    (
        $(#[$meta:meta])*
        pub struct $options:ident {
            $(
                $(#[$attribute:meta])*
                pub $field:ident: $type:ty
                    $(=> $name:literal $variant:ident($value:ty) for $scope:ident by $by:ident as $syntax:path)?,
            )*
        }
    ) => {
        $(#[$meta])*
        pub struct $options {
            $($(#[$attribute])* pub $field: $type,)*
        }

        /// A setting with its value.
        #[derive(Clone, PartialEq, Debug)]
        pub enum Setting {
            $($($variant($value),)?)*
        }

        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Key {
            $($($variant,)?)*
        }

        /// The settings, in the order of the options of `attach`.
        pub static ROWS: &[Row] = &[
            $($(Row {
                key: Key::$variant,
                name: $name,
                scope: Scope::$scope,
                implementer: Implementer::$by,
                values: $syntax.values,
                read: |text| ($syntax.parse)($name, text).map(Setting::$variant),
            },)?)*
        ];

        /// The names of all options, as fields.
        pub static FIELDS: &[&str] = &[$(stringify!($field)),*];

        impl Setting {
            pub fn key(&self) -> Key {
                match self {
                    $($(Setting::$variant(_) => Key::$variant,)?)*
                }
            }

            /// The value as text, which [`Row::read`] parses.
            pub fn value(&self) -> String {
                match self {
                    $($(Setting::$variant(value) => ($syntax.print)(value),)?)*
                }
            }
        }

        impl $options {
            /// The value that the option gives to the setting; `None` for an option that is not given.
            pub fn setting(&self, key: Key) -> Option<Setting> {
                match key {
                    $($(Key::$variant => Option::<$value>::from(Clone::clone(&self.$field)).map(Setting::$variant),)?)*
                }
            }

            pub fn put(&mut self, setting: &Setting) {
                match setting {
                    $($(Setting::$variant(value) => self.$field = Clone::clone(value).into(),)?)*
                }
            }
        }
    };
}

pub(super) use attach_options;
