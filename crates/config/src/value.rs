//! Typed access to the values of the file. A value has a path, which messages show.

use std::collections::HashSet;

use tidegate_net::input::{HIDDEN, may_hold_secret, nearest, shown};

use super::{
    Mistake,
    report::{Report, renamed, unknown_key},
    yaml::{Content, Node},
};

/// A value in the file and its path.
#[derive(Clone, Debug)]
pub struct Value<'n> {
    path: String,
    node: &'n Node<'n>,
    /// The line of the key in a map. A value in block style begins on a later line.
    key_line: usize,
}

/// The fields of a map after its unknown keys were reported and removed.
#[derive(Debug)]
pub struct Fields<'n> {
    map: Value<'n>,
    fields: Vec<(&'n str, Value<'n>)>,
    /// The known keys that correspond to unknown keys: those with an old name, and those that are
    /// probably misspelt.
    misspelt: Vec<&'static str>,
}

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A text, a number or nothing.
    Scalar,
    /// A list.
    List,
    /// A map.
    Map,
}

impl<'n> Value<'n> {
    /// Returns the root of a document.
    #[must_use]
    pub fn root(node: &'n Node<'n>) -> Self {
        Self {
            path: String::new(),
            node,
            key_line: node.line,
        }
    }

    /// Returns the kind of the value.
    #[must_use]
    pub fn shape(&self) -> Shape {
        match self.node.content {
            Content::Empty | Content::Plain(_) | Content::Quoted(_) => Shape::Scalar,
            Content::List(_) => Shape::List,
            Content::Map(_) => Shape::Map,
        }
    }

    /// Reports a mistake at this value.
    pub fn wrong(&self, report: &mut Report, message: impl Into<String>) {
        report.mistake(self.at(&self.path, message.into()));
    }

    /// Adds a warning at this value.
    pub fn warn(&self, report: &mut Report, message: impl Into<String>) {
        report.warn(self.at(&self.path, message.into()));
    }

    /// Reports a mistake in the key of this value.
    pub fn wrong_key(&self, report: &mut Report, message: impl Into<String>) {
        report.mistake(self.at_key(message.into()));
    }

    /// Adds a warning about the key of this value.
    pub fn warn_of_key(&self, report: &mut Report, message: impl Into<String>) {
        report.warn(self.at_key(message.into()));
    }

    /// Reports that this value should have been `what`.
    pub(crate) fn expected(&self, report: &mut Report, what: &str) {
        self.wrong(report, format!("expected {what}, got {}", self.describe()));
    }

    /// Returns the text of a scalar, quoted or not. Reports any other kind of value.
    pub(crate) fn text(&self, report: &mut Report, what: &str) -> Option<&'n str> {
        let text = self.scalar();
        if text.is_none() {
            self.expected(report, what);
        }
        text
    }

    /// Returns the text, if the value is a scalar.
    #[must_use]
    pub fn scalar(&self) -> Option<&'n str> {
        match &self.node.content {
            Content::Plain(text) | Content::Quoted(text) => Some(text),
            Content::Empty | Content::List(_) | Content::Map(_) => None,
        }
    }

    /// Returns whether there is no value: `null`, `~`, or nothing after the key.
    pub(crate) fn is_null(&self) -> bool {
        matches!(self.node.content, Content::Empty)
    }

    /// Parses the text with `parse`, whose error messages name the expected form.
    pub(crate) fn parsed<T, E: ToString>(
        &self,
        report: &mut Report,
        what: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(report, what)?;
        parse(text)
            .map_err(|error| {
                let message = error.to_string();
                // Error messages of parsers repeat all or part of the input, which may be a secret
                // here.
                let repeats = message.contains("got ") || message.contains(text);
                if self.is_secret(text) && repeats {
                    self.expected(report, what);
                } else {
                    self.wrong(report, message);
                }
            })
            .ok()
    }

    /// Returns whether the value is an unquoted number of any form, even if it is not valid here.
    pub(crate) fn looks_like_number(&self) -> bool {
        matches!(&self.node.content, Content::Plain(text) if text.parse::<f64>().is_ok())
    }

    /// Returns a non-negative integer. A quoted number is a mistake.
    pub(crate) fn number(&self, report: &mut Report) -> Option<u64> {
        let is_digits =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match &self.node.content {
            Content::Plain(text) if is_digits(text) => {
                let number = text.parse().ok();
                if number.is_none() {
                    self.wrong(report, format!("{} is too large a number", shown(text)));
                }
                number
            }
            Content::Quoted(text) if is_digits(text) => {
                let message = format!(
                    "expected a whole number, got the text \"{}\"; remove the quotes",
                    shown(text)
                );
                self.wrong(report, message);
                None
            }
            _ => {
                self.expected(report, "a whole number");
                None
            }
        }
    }

    /// Returns a non-negative integer that fits in `T`. `T` must hold every useful value.
    pub(crate) fn small_number<T: TryFrom<u64>>(&self, report: &mut Report) -> Option<T> {
        let number = self.number(report)?;
        let small = T::try_from(number).ok();
        if small.is_none() {
            self.wrong(report, format!("{number} is too large a number"));
        }
        small
    }

    /// Returns `true` or `false`.
    pub(crate) fn flag(&self, report: &mut Report) -> Option<bool> {
        match &self.node.content {
            Content::Plain(text) if text == "true" => Some(true),
            Content::Plain(text) if text == "false" => Some(false),
            _ => {
                self.expected(report, "true or false");
                None
            }
        }
    }

    /// Returns the element of `choices` that the value names.
    pub(crate) fn choice<T: Copy>(&self, report: &mut Report, choices: &[(&str, T)]) -> Option<T> {
        let text = self.scalar();
        if let Some((_, choice)) = choices.iter().find(|(name, _)| Some(*name) == text) {
            return Some(*choice);
        }
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let guess = text.and_then(|text| nearest(text, &names));
        let guess = guess
            .map(|guess| format!("; did you mean `{guess}`?"))
            .unwrap_or_default();
        let message = format!(
            "expected one of {}, got {}{guess}",
            names.join(", "),
            self.describe()
        );
        self.wrong(report, message);
        None
    }

    /// Returns the items of a list. An empty value is an empty list.
    pub fn items(&self, report: &mut Report, what: &str) -> Option<Vec<Self>> {
        match &self.node.content {
            Content::Empty => Some(Vec::new()),
            Content::List(items) => {
                let item = |(at, node)| Self {
                    path: format!("{}[{at}]", self.path),
                    node,
                    key_line: node.line,
                };
                Some(items.iter().enumerate().map(item).collect())
            }
            Content::Plain(_) | Content::Quoted(_) | Content::Map(_) => {
                self.expected(report, what);
                None
            }
        }
    }

    /// Returns the items of a list. A value that is not a list is returned as the only item.
    pub fn one_or_more(&self, report: &mut Report) -> Vec<Self> {
        match self.node.content {
            Content::Empty | Content::List(_) => self.items(report, "a list").unwrap_or_default(),
            Content::Plain(_) | Content::Quoted(_) | Content::Map(_) => vec![self.clone()],
        }
    }

    /// Returns the fields of a map and reports keys that are not `known`. An empty value is an
    /// empty map.
    pub(crate) fn fields(
        &self,
        report: &mut Report,
        what: &str,
        known: &[&'static str],
    ) -> Option<Fields<'n>> {
        let mut fields = self.pairs(report, what)?;
        let mut misspelt = Vec::new();
        fields.retain(|(key, value)| {
            let is_known = known.contains(key);
            if !is_known {
                value.wrong_key(report, unknown_key(key, known));
                misspelt.extend(renamed(key, known).or_else(|| nearest(key, known)));
            }
            is_known
        });
        Some(Fields {
            map: self.clone(),
            fields,
            misspelt,
        })
    }

    /// Returns only the fields in `known`. Other keys are not reported here, because other code
    /// reads them.
    #[must_use]
    pub fn fields_among(&self, known: &[&'static str]) -> Option<Fields<'n>> {
        let mut fields = self.pairs(&mut Report::default(), "")?;
        fields.retain(|(key, _)| known.contains(key));
        Some(Fields {
            map: self.clone(),
            fields,
            misspelt: Vec::new(),
        })
    }

    /// Returns the keys and values of a map, and reports repeated keys. An empty value is an empty
    /// map.
    pub(crate) fn pairs(&self, report: &mut Report, what: &str) -> Option<Vec<(&'n str, Self)>> {
        let pairs = match &self.node.content {
            Content::Empty => return Some(Vec::new()),
            Content::Map(pairs) => pairs,
            Content::Plain(_) | Content::Quoted(_) | Content::List(_) => {
                self.expected(report, what);
                return None;
            }
        };
        let (mut seen, mut read) = (HashSet::new(), Vec::with_capacity(pairs.len()));
        for (key, node) in pairs {
            let (Content::Plain(name) | Content::Quoted(name)) = &key.content else {
                let message = "expected a key, got a list, a map or nothing";
                report.mistake(Mistake {
                    path: self.path.clone(),
                    line: Some(key.line),
                    message: message.into(),
                });
                continue;
            };
            let value = Self {
                path: self.path_of(name),
                node,
                key_line: key.line,
            };
            if seen.insert(&**name) {
                read.push((&**name, value));
            } else {
                let message = format!("duplicate key `{}`; remove one of the two", shown(name));
                report.mistake(Mistake {
                    path: value.path,
                    line: Some(key.line),
                    message,
                });
            }
        }
        Some(read)
    }

    /// Returns the content as parsed from the file.
    #[must_use]
    pub fn content(&self) -> &'n Content<'n> {
        &self.node.content
    }

    /// Returns the keys and values of a map, including repeated keys. A key that is not a scalar is
    /// `None`. A value that is not a map has no members.
    #[must_use]
    pub fn members(&self) -> Vec<(Option<&'n Content<'n>>, Self)> {
        let Content::Map(pairs) = &self.node.content else {
            return Vec::new();
        };
        let member = |(key, node): &'n (Node<'n>, Node<'n>)| {
            let (Content::Plain(name) | Content::Quoted(name)) = &key.content else {
                return (
                    None,
                    Self {
                        path: self.path.clone(),
                        node,
                        key_line: key.line,
                    },
                );
            };
            (
                Some(&key.content),
                Self {
                    path: self.path_of(name),
                    node,
                    key_line: key.line,
                },
            )
        };
        pairs.iter().map(member).collect()
    }

    fn path_of(&self, key: &str) -> String {
        let dot = if self.path.is_empty() { "" } else { "." };
        format!("{}{dot}{}", self.path, shown(key))
    }

    fn at(&self, path: &str, message: String) -> Mistake {
        Mistake {
            path: path.to_owned(),
            line: Some(self.node.line),
            message,
        }
    }

    fn at_key(&self, message: String) -> Mistake {
        Mistake {
            line: Some(self.key_line),
            ..self.at(&self.path, message)
        }
    }

    /// Returns whether messages must hide this value, whose text is `text`. It is hidden if it
    /// looks like a URL with a password, or is in a section or field that holds passwords and
    /// tokens.
    fn is_secret(&self, text: &str) -> bool {
        let section = self.path.split(['.', '[']).next().unwrap_or_default();
        let names_secret = ["token", "password", "password_env", "token_env"]
            .iter()
            .any(|name| self.path.ends_with(name));
        // Numbers and units are not secret, and they are useful in messages.
        let is_bound = self.path.starts_with("store.memory.");
        matches!(section, "admin" | "store") && !is_bound || names_secret || may_hold_secret(text)
    }

    /// Describes the value for a message. A secret is not shown.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.node.content {
            Content::Plain(text) | Content::Quoted(text) if self.is_secret(text) => {
                HIDDEN.to_owned()
            }
            Content::Empty => "nothing".into(),
            Content::Plain(text) if self.looks_like_number() => {
                format!("the number {}", shown(text))
            }
            Content::Plain(text) | Content::Quoted(text) => format!("\"{}\"", shown(text)),
            Content::List(_) => "a list".into(),
            Content::Map(_) => "a map".into(),
        }
    }
}

impl<'n> Fields<'n> {
    /// Returns the field `name`, if the map has it.
    pub(crate) fn get(&self, name: &str) -> Option<&Value<'n>> {
        self.fields
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }

    /// Returns whether the map has the field `name` or a probable misspelling of it. A misspelled
    /// field is already reported as unknown, so callers do not report it as missing too.
    pub(crate) fn tries(&self, name: &str) -> bool {
        self.get(name).is_some() || self.misspelt.contains(&name)
    }

    /// Reports a mistake in the field `name`. If the map lacks the field, the mistake is on the
    /// line of the map.
    pub(crate) fn wrong(&self, report: &mut Report, name: &str, message: impl Into<String>) {
        match self.get(name) {
            Some(value) => value.wrong(report, message),
            None => report.mistake(self.map.at(&self.map.path_of(name), message.into())),
        }
    }
}
