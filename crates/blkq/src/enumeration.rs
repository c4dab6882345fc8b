/// Declares an enum with a value for each variant, such as a name. Adds the constants `COUNT` and `ALL`, and a method
/// that returns the value. With a last line `parse |text| -> Error { error }`, names are displayed and parsed, and an
/// unknown `text` fails with `error`.
#[doc(hidden)]
#[macro_export]
macro_rules! enumeration {
    (
        $(#[$about:meta])*
        pub enum $Enum:ident {
            $($(#[$variant_about:meta])* $Variant:ident $(= $number:literal)? => $value:expr,)*
        }

        $(#[$method_about:meta])*
        $visibility:vis const fn $method:ident(self) -> $Value:ty;
        $(parse |$text:ident| -> $Error:ty $error:block)?
    ) => {
        $(#[$about])*
        pub enum $Enum {
            $($(#[$variant_about])* $Variant $(= $number)?,)*
        }

        impl $Enum {
            /// The number of variants.
            pub const COUNT: usize = [$($Enum::$Variant),*].len();
            /// All variants, in the order of their numbers.
            pub const ALL: [$Enum; Self::COUNT] = [$($Enum::$Variant),*];

            $(#[$method_about])*
            $visibility const fn $method(self) -> $Value {
                match self {
                    $($Enum::$Variant => $value,)*
                }
            }
        }

        $(
            impl std::fmt::Display for $Enum {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str(self.$method())
                }
            }

            impl std::str::FromStr for $Enum {
                type Err = $Error;

                fn from_str($text: &str) -> Result<$Enum, $Error> {
                    let named = $Enum::ALL.into_iter().find(|value| value.$method() == $text);
                    named.ok_or_else(|| $error)
                }
            }
        )?
    };
}

pub(crate) use enumeration;
