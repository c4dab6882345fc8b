use serde::Serialize;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// The part works, with restrictions.
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

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub state: State,
    /// No image can be served without this part.
    pub needed: bool,
    /// The user asked for this part with an option: the command fails if the part is missing.
    #[serde(skip)]
    pub asked: bool,
    pub found: String,
    /// A command, or the page that has the commands. The key in the JSON is older than the field's name.
    #[serde(rename = "cure")]
    pub hint: Option<String>,
}

impl Finding {
    pub fn ok(name: &'static str, found: impl Into<String>) -> Finding {
        Finding { name, state: State::Ok, needed: false, asked: false, found: found.into(), hint: None }
    }

    pub fn limited(name: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { state: State::Limited, hint: Some(hint.into()), ..Finding::ok(name, found) }
    }

    pub fn missing(name: &'static str, found: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { state: State::Missing, ..Finding::limited(name, found, hint) }
    }

    pub fn needed(self) -> Finding {
        Finding { needed: true, ..self }
    }

    pub fn asked(self) -> Finding {
        Finding { asked: true, ..self }
    }
}
