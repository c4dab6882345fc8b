//! The JSON forms of options whose types belong to other crates: `#[serde(with = "json")]`.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use blkq::throttle::LimitMode;
use blkq::{ClockMode, ErrorPolicy, SchedulerKind};
use blkq_drivers::DriverSpec;
use blkq_drivers::fault::FaultSpec;
use blkq_drivers::r#loop::{DirectIo, Dispatch};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::values::{image_text, parse_hang_warning, parse_image, parse_mode};

pub trait Json: Sized {
    type Form: Serialize + DeserializeOwned;

    fn form(&self) -> Self::Form;

    /// Fails with the rule that the form breaks.
    fn read(form: Self::Form) -> Result<Self, String>;
}

pub fn serialize<S: Serializer>(value: &impl Json, serializer: S) -> Result<S::Ok, S::Error> {
    value.form().serialize(serializer)
}

pub fn deserialize<'de, D: Deserializer<'de>, T: Json>(deserializer: D) -> Result<T, D::Error> {
    T::read(T::Form::deserialize(deserializer)?).map_err(D::Error::custom)
}

impl<T: Json> Json for Option<T> {
    type Form = Option<T::Form>;

    fn form(&self) -> Self::Form {
        self.as_ref().map(Json::form)
    }

    fn read(form: Self::Form) -> Result<Self, String> {
        form.map(T::read).transpose()
    }
}

/// A path as text, or as bytes if it is not UTF-8.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub enum PathForm {
    Text(String),
    Bytes(Vec<u8>),
}

impl PathForm {
    fn into_os_string(self) -> OsString {
        match self {
            PathForm::Text(text) => text.into(),
            PathForm::Bytes(bytes) => OsString::from_vec(bytes),
        }
    }
}

impl Json for PathBuf {
    type Form = PathForm;

    fn form(&self) -> PathForm {
        match self.to_str() {
            Some(text) => PathForm::Text(text.to_owned()),
            None => PathForm::Bytes(self.as_os_str().as_bytes().to_vec()),
        }
    }

    fn read(form: PathForm) -> Result<PathBuf, String> {
        Ok(form.into_os_string().into())
    }
}

/// A file whose name looks like another driver is written with a directory (`./ram:1M`).
impl Json for DriverSpec {
    type Form = PathForm;

    fn form(&self) -> PathForm {
        match self {
            DriverSpec::Image(path) => match path.to_str().map(str::parse) {
                Some(Ok(DriverSpec::Image(_))) | None => path.form(),
                _ => Path::new(".").join(path).form(),
            },
            other => PathForm::Text(image_text(other)),
        }
    }

    fn read(form: PathForm) -> Result<DriverSpec, String> {
        parse_image(form.into_os_string()).map_err(|e| e.to_string())
    }
}

/// The form is a number of seconds.
impl Json for Duration {
    type Form = f64;

    fn form(&self) -> f64 {
        self.as_secs_f64()
    }

    fn read(seconds: f64) -> Result<Duration, String> {
        parse_hang_warning(&seconds.to_string())
    }
}

/// Permissions of files, the only numbers with this form: octal digits, as for chmod(1).
impl Json for u32 {
    type Form = String;

    fn form(&self) -> String {
        format!("{self:03o}")
    }

    fn read(digits: String) -> Result<u32, String> {
        parse_mode(&digits)
    }
}

macro_rules! by_name {
    ($name:ident: $($type:ty),*) => {$(
        impl Json for $type {
            type Form = String;

            fn form(&self) -> String {
                self.$name().into()
            }

            fn read(name: String) -> Result<$type, String> {
                name.parse().map_err(|e: blkq::Error| e.to_string())
            }
        }
    )*};
}

by_name!(name: DirectIo, Dispatch);
by_name!(to_string: ClockMode, SchedulerKind, FaultSpec, LimitMode, ErrorPolicy);
