//! Source spans: the positions of values in the rules file, for errors and warnings about them.

use tidegate_net::input::{HIDDEN, may_hold_secret, shown};

use super::{Mistake, report::Report};

/// The position of a value in the rules file.
#[derive(Clone, Debug)]
pub(crate) struct SourceSpan {
    /// The path of the value, such as `rules[0].limits[1]`; empty for the file as a whole.
    pub(crate) path: Box<str>,
    /// The line of the value.
    pub(crate) line: usize,
    /// The line of the value's key in a map. In block style, the line of a value can be after the
    /// line of its key.
    pub(crate) key_line: usize,
}

impl SourceSpan {
    /// Reports an error at this value.
    pub(crate) fn wrong(&self, report: &mut Report, message: impl Into<String>) {
        report.mistake(self.at(&self.path, message.into()));
    }

    /// Adds a warning at this value.
    pub(crate) fn warn(&self, report: &mut Report, message: impl Into<String>) {
        report.warn(self.at(&self.path, message.into()));
    }

    /// Reports an error in the key of this value.
    pub(crate) fn wrong_key(&self, report: &mut Report, message: impl Into<String>) {
        report.mistake(self.at_key(message.into()));
    }

    /// Adds a warning about the key of this value.
    pub(crate) fn warn_of_key(&self, report: &mut Report, message: impl Into<String>) {
        report.warn(self.at_key(message.into()));
    }

    /// Creates an error with this `path` and the line of this value.
    pub(crate) fn at(&self, path: &str, message: String) -> Mistake {
        Mistake {
            path: path.to_owned(),
            line: Some(self.line),
            message,
        }
    }

    fn at_key(&self, message: String) -> Mistake {
        Mistake {
            line: Some(self.key_line),
            ..self.at(&self.path, message)
        }
    }

    /// Returns the path of the value of `key` in this map.
    pub(crate) fn path_of(&self, key: &str) -> String {
        let dot = if self.path.is_empty() { "" } else { "." };
        format!("{}{dot}{}", self.path, shown(key))
    }

    /// Returns whether messages must hide the value `text` at this position. A value must be hidden
    /// if it looks like a URL with a password, if its section or field is for passwords or tokens,
    /// or if it is a free-form string in the Redis settings.
    fn is_secret(&self, text: &str) -> bool {
        let is_under = |known: &str| {
            let rest = self.path.strip_prefix(known);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let names_secret = ["token", "password", "password_env", "token_env"]
            .iter()
            .any(|name| self.path.ends_with(name));
        // Numbers, durations and choices in the store settings are not secret, and are useful in
        // messages. Free-form strings may be secret: for example, a URL with a password does not
        // look like a URL if its scheme is missing.
        let is_free_text =
            matches!(&*self.path, "store" | "store.prefix") || is_under("store.redis");
        let is_of_hashes = &*self.path == "privacy"
            || is_under("privacy.secret")
            || is_under("privacy.secret_env")
            || is_under("reservations.secret")
            || is_under("reservations.secret_env");
        let is_in_secret_section = is_under("admin") || is_of_hashes || is_free_text;
        is_in_secret_section || names_secret || may_hold_secret(text)
    }
}

/// A scalar in the file, and its position.
#[derive(Clone, Debug)]
pub(crate) struct Scalar<'n> {
    pub(crate) span: SourceSpan,
    pub(crate) text: &'n str,
    pub(crate) is_quoted: bool,
}

impl Scalar<'_> {
    /// Returns whether the scalar is an unquoted number in any notation, even if the number is not
    /// valid for this field.
    pub(crate) fn looks_like_number(&self) -> bool {
        !self.is_quoted && self.text.parse::<f64>().is_ok()
    }

    /// Returns whether messages must hide the scalar.
    pub(crate) fn is_secret(&self) -> bool {
        self.span.is_secret(self.text)
    }

    /// Returns a description of the scalar for a message. The description never contains a secret.
    pub(crate) fn describe(&self) -> String {
        if self.is_secret() {
            HIDDEN.to_owned()
        } else if self.looks_like_number() {
            format!("the number {}", shown(self.text))
        } else {
            format!("\"{}\"", shown(self.text))
        }
    }
}
