/// Declares an enum with a value for each variant, such as a name. Adds the constants `COUNT` and `ALL`, and a method
/// that returns the value.
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
    };
}

pub(crate) use enumeration;
