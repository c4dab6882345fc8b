//! One part of a machine, as it was found.

use serde::Serialize;

/// How a part of the machine is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// It works, with less.
    Limited,
    Missing,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "missing",
        }
    }
}

/// The state of one part.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub state: State,
    /// Whether nothing can be served without it.
    pub needed: bool,
    /// Whether the user asked for this part.
    #[serde(skip)]
    pub asked: bool,
    pub found: String,
    /// The command that changes it, or where that is explained.
    pub cure: Option<String>,
}

impl Finding {
    pub fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, state: State::Ok, needed: false, asked: false, found: found.into(), cure: None }
    }

    pub fn limited(name: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Finding {
        Finding { state: State::Limited, cure: Some(cure.into()), ..Finding::ok(name, found) }
    }

    pub fn missing(name: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Finding {
        Finding { state: State::Missing, ..Finding::limited(name, found, cure) }
    }

    pub fn needed(self) -> Finding {
        Finding { needed: true, ..self }
    }

    pub fn asked(self) -> Finding {
        Finding { asked: true, ..self }
    }

    pub fn is_missing(&self) -> bool {
        self.state == State::Missing
    }
}
