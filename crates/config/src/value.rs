//! Typed access to the values in a rules file. Messages show the path of each value, such as
//! `rules[0].name`.

use std::collections::HashSet;

use tidegate_core::notation;
use tidegate_net::input::{nearest, shown};

use super::{
    Mistake,
    report::{Report, renamed, unknown_key},
    source_span::{Scalar, SourceSpan},
    yaml::{YamlContent, YamlNode},
};

/// A value in the file and its path.
#[derive(Clone, Debug)]
pub struct Value<'n> {
    span: SourceSpan,
    node: &'n YamlNode<'n>,
}

/// The known fields of a map. Unknown keys have already been reported and are not included.
#[derive(Debug)]
pub struct Fields<'n> {
    map: Value<'n>,
    fields: Vec<(&'n str, Value<'n>)>,
    /// The known keys that the map probably contains under a misspelt or old name.
    misspelt: Vec<&'static str>,
}

/// The kind of a YAML value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A string, a number or an empty value.
    Scalar,
    /// A list.
    List,
    /// A map.
    Map,
}

impl<'n> Value<'n> {
    /// Returns the root of a document.
    #[must_use]
    pub fn root(node: &'n YamlNode<'n>) -> Self {
        Self::new(String::new(), node, node.line)
    }

    /// Creates the value at `path` whose key is on `key_line`.
    fn new(path: String, node: &'n YamlNode<'n>, key_line: usize) -> Self {
        let span = SourceSpan {
            path: path.into_boxed_str(),
            line: node.line,
            key_line,
        };
        Self { span, node }
    }

    /// Returns the position of the value in the file.
    pub(crate) fn span(&self) -> &SourceSpan {
        &self.span
    }

    /// Returns the kind of the value.
    #[must_use]
    pub fn shape(&self) -> Shape {
        match self.node.content {
            YamlContent::Empty | YamlContent::Plain(_) | YamlContent::Quoted(_) => Shape::Scalar,
            YamlContent::List(_) => Shape::List,
            YamlContent::Map(_) => Shape::Map,
        }
    }

    /// Reports an error at this value.
    pub fn wrong(&self, report: &mut Report, message: impl Into<String>) {
        self.span.wrong(report, message);
    }

    /// Adds a warning at this value.
    pub fn warn(&self, report: &mut Report, message: impl Into<String>) {
        self.span.warn(report, message);
    }

    /// Reports an error in the key of this value.
    pub fn wrong_key(&self, report: &mut Report, message: impl Into<String>) {
        self.span.wrong_key(report, message);
    }

    /// Adds a warning about the key of this value.
    pub fn warn_of_key(&self, report: &mut Report, message: impl Into<String>) {
        self.span.warn_of_key(report, message);
    }

    /// Reports an error that says that `what` was expected instead of this value.
    pub(crate) fn expected(&self, report: &mut Report, what: &str) {
        self.wrong(report, format!("expected {what}, got {}", self.describe()));
    }

    /// Returns the string in a scalar, quoted or not. Reports any other kind of value as an error.
    pub(crate) fn text(&self, report: &mut Report, what: &str) -> Option<&'n str> {
        let text = self.scalar();
        if text.is_none() {
            self.expected(report, what);
        }
        text
    }

    /// Returns the string in a scalar, and its position. Reports any other kind of value as an
    /// error.
    pub(crate) fn text_with_span(&self, report: &mut Report, what: &str) -> Option<Scalar<'n>> {
        self.text(report, what)?;
        self.scalar_with_span()
    }

    /// Returns the string in the value, if the value is a scalar.
    #[must_use]
    pub fn scalar(&self) -> Option<&'n str> {
        match &self.node.content {
            YamlContent::Plain(text) | YamlContent::Quoted(text) => Some(text),
            YamlContent::Empty | YamlContent::List(_) | YamlContent::Map(_) => None,
        }
    }

    /// Returns the string in the value and its position, if the value is a scalar.
    pub(crate) fn scalar_with_span(&self) -> Option<Scalar<'n>> {
        Some(Scalar {
            text: self.scalar()?,
            span: self.span.clone(),
            is_quoted: matches!(self.node.content, YamlContent::Quoted(_)),
        })
    }

    /// Returns whether there is no value: `null`, `~`, or nothing after the key.
    #[must_use]
    pub fn is_null(&self) -> bool {
        matches!(self.node.content, YamlContent::Empty)
    }

    /// Parses the scalar with `parse`. The error messages of `parse` must describe the expected
    /// form.
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
                // The parser's error message may repeat the input, which may be a secret.
                let repeats = message.contains("got ") || message.contains(text);
                if self.is_secret() && repeats {
                    self.expected(report, what);
                } else {
                    self.wrong(report, message);
                }
            })
            .ok()
    }

    /// Returns whether the value is an unquoted number in any notation, even if the number is not
    /// valid for this field.
    pub(crate) fn looks_like_number(&self) -> bool {
        matches!(&self.node.content, YamlContent::Plain(text) if text.parse::<f64>().is_ok())
    }

    /// Returns a non-negative integer. Reports a quoted number as an error.
    pub(crate) fn number(&self, report: &mut Report) -> Option<u64> {
        let is_digits =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match &self.node.content {
            YamlContent::Plain(text) if is_digits(text) => {
                let number = text.parse().ok();
                if number.is_none() {
                    self.wrong(report, format!("{} is too large a number", shown(text)));
                }
                number
            }
            YamlContent::Quoted(text) if is_digits(text) => {
                let message = format!(
                    "expected an integer, got the string \"{}\"; remove the quotes",
                    shown(text)
                );
                self.wrong(report, message);
                None
            }
            _ => {
                let meant = self.scalar().and_then(notation::integer_meant);
                match meant.filter(|_| !self.is_secret()) {
                    Some(meant) => {
                        let message = format!(
                            "expected a non-negative integer, got {}; write {meant}",
                            self.describe()
                        );
                        self.wrong(report, message);
                    }
                    None => self.expected(report, "a non-negative integer"),
                }
                None
            }
        }
    }

    /// Returns a non-negative integer that fits in `T`. The caller must choose a type `T` that can
    /// represent every reasonable value.
    pub(crate) fn small_number<T: TryFrom<u64>>(&self, report: &mut Report) -> Option<T> {
        let number = self.number(report)?;
        let small = T::try_from(number).ok();
        if small.is_none() {
            self.wrong(report, format!("{number} is too large a number"));
        }
        small
    }

    /// Returns the boolean. Reports any value other than `true` and `false` as an error.
    pub(crate) fn flag(&self, report: &mut Report) -> Option<bool> {
        match &self.node.content {
            YamlContent::Plain(text) if text == "true" => Some(true),
            YamlContent::Plain(text) if text == "false" => Some(false),
            _ => {
                self.expected(report, "true or false");
                None
            }
        }
    }

    /// Returns the element of `choices` whose name equals this value.
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
            YamlContent::Empty => Some(Vec::new()),
            YamlContent::List(items) => {
                let item = |(at, node): (usize, &'n YamlNode<'n>)| {
                    Self::new(format!("{}[{at}]", self.span.path), node, node.line)
                };
                Some(items.iter().enumerate().map(item).collect())
            }
            YamlContent::Plain(_) | YamlContent::Quoted(_) | YamlContent::Map(_) => {
                self.expected(report, what);
                None
            }
        }
    }

    /// Returns the items of a list. A value that is not a list is returned as the only item.
    pub fn one_or_more(&self, report: &mut Report) -> Vec<Self> {
        match self.node.content {
            YamlContent::Empty | YamlContent::List(_) => {
                self.items(report, "a list").unwrap_or_default()
            }
            YamlContent::Plain(_) | YamlContent::Quoted(_) | YamlContent::Map(_) => {
                vec![self.clone()]
            }
        }
    }

    /// Returns the fields of a map, and reports keys that are not in `known`. An empty value is an
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

    /// Returns only the fields in `known`. Other keys are neither returned nor reported, because
    /// other code reads them.
    #[must_use]
    pub fn fields_among(&self, known: &[&'static str]) -> Option<Fields<'n>> {
        let mut fields = self.entries(|_| {})?;
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
        let pairs = self.entries(|mistake| report.mistake(mistake));
        if pairs.is_none() {
            self.expected(report, what);
        }
        pairs
    }

    /// Returns whether the value is empty, or a map without entries.
    pub(crate) fn is_empty_map(&self) -> bool {
        self.entries(|_| {}).is_some_and(|pairs| pairs.is_empty())
    }

    /// Returns the keys and values of a map, and calls `mistaken` with an error for each key that
    /// is repeated or is not a string. Returns `None` for a value that is not a map.
    fn entries(&self, mut mistaken: impl FnMut(Mistake)) -> Option<Vec<(&'n str, Self)>> {
        let pairs = match &self.node.content {
            YamlContent::Empty => return Some(Vec::new()),
            YamlContent::Map(pairs) => pairs,
            YamlContent::Plain(_) | YamlContent::Quoted(_) | YamlContent::List(_) => return None,
        };
        let (mut seen, mut read) = (HashSet::new(), Vec::with_capacity(pairs.len()));
        for (key, node) in pairs {
            let (YamlContent::Plain(name) | YamlContent::Quoted(name)) = &key.content else {
                mistaken(Mistake {
                    path: self.span.path.to_string(),
                    line: Some(key.line),
                    message: "expected a key, got a list, a map or nothing".to_owned(),
                });
                continue;
            };
            let path = self.span.path_of(name);
            if seen.insert(&**name) {
                read.push((&**name, Self::new(path, node, key.line)));
            } else {
                mistaken(Mistake {
                    path,
                    line: Some(key.line),
                    message: format!("duplicate key `{}`; remove one of the two", shown(name)),
                });
            }
        }
        Some(read)
    }

    /// Returns the content of the node, as the YAML parser has read it.
    #[must_use]
    pub fn content(&self) -> &'n YamlContent<'n> {
        &self.node.content
    }

    /// Returns the keys and values of a map, including repeated keys. A key that is not a scalar is
    /// `None`. If the value is not a map, returns an empty list.
    #[must_use]
    pub fn members(&self) -> Vec<(Option<&'n YamlContent<'n>>, Self)> {
        let YamlContent::Map(pairs) = &self.node.content else {
            return Vec::new();
        };
        let member = |(key, node): &'n (YamlNode<'n>, YamlNode<'n>)| match &key.content {
            YamlContent::Plain(name) | YamlContent::Quoted(name) => {
                let value = Self::new(self.span.path_of(name), node, key.line);
                (Some(&key.content), value)
            }
            YamlContent::Empty | YamlContent::List(_) | YamlContent::Map(_) => {
                (None, Self::new(self.span.path.to_string(), node, key.line))
            }
        };
        pairs.iter().map(member).collect()
    }

    fn is_secret(&self) -> bool {
        self.scalar_with_span()
            .is_some_and(|scalar| scalar.is_secret())
    }

    /// Returns a description of the value for a message. The description never contains a secret.
    #[must_use]
    pub fn describe(&self) -> String {
        match (&self.node.content, self.scalar_with_span()) {
            (_, Some(scalar)) => scalar.describe(),
            (YamlContent::List(_), None) => "a list".to_owned(),
            (YamlContent::Map(_), None) => "a map".to_owned(),
            (_, None) => "nothing".to_owned(),
        }
    }
}

impl<'n> Fields<'n> {
    /// Returns the field `name`, if the map has this field.
    pub(crate) fn get(&self, name: &str) -> Option<&Value<'n>> {
        self.fields
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }

    /// Returns the fields in the order of the file.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &(&'n str, Value<'n>)> {
        self.fields.iter()
    }

    /// Returns whether the map contains the field `name`, possibly under a misspelt or old name.
    /// The misspelt or old name has already been reported as unknown, so callers do not report
    /// `name` as missing too.
    pub(crate) fn tries(&self, name: &str) -> bool {
        self.get(name).is_some() || self.misspelt.contains(&name)
    }

    /// Reports an error in the field `name`. If the field is missing, reports the error on the line
    /// of the map.
    pub(crate) fn wrong(&self, report: &mut Report, name: &str, message: impl Into<String>) {
        match self.get(name) {
            Some(value) => value.wrong(report, message),
            None => {
                let map = &self.map.span;
                report.mistake(map.at(&map.path_of(name), message.into()));
            }
        }
    }
}

/// Returns `number`, which was read from `value`. Reports 0 as an error.
pub(crate) fn at_least_one(
    number: Option<usize>,
    value: &Value<'_>,
    report: &mut Report,
) -> Option<usize> {
    if number == Some(0) {
        value.wrong(report, "must be at least 1");
    }
    number.filter(|number| *number > 0)
}
