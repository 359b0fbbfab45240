//! Reading values out of the tree, collecting every mistake on the way.

use std::net::SocketAddr;

use tidegate_core::{Rate, Span, bounds, notation};

use super::{
    Mistake,
    node::{Key, Node, Value, shortened},
};

/// A place in the file: a node and the path that leads to it.
#[derive(Clone, Debug)]
pub(super) struct Place<'n> {
    pub(super) node: &'n Node,
    pub(super) path: String,
}

/// Every mistake found so far.
#[derive(Debug, Default)]
pub(super) struct Mistakes(pub(super) Vec<Mistake>);

impl Mistakes {
    pub(super) fn at(&mut self, place: &Place<'_>, message: impl Into<String>) {
        self.0.push(Mistake {
            path: place.path.clone(),
            line: Some(place.node.line),
            message: message.into(),
        });
    }

    /// A mistake in a field of `place`, which may not have been written at all.
    pub(super) fn in_field(&mut self, place: &Place<'_>, field: &str, message: impl Into<String>) {
        match place.field(field) {
            Some(field) => self.at(&field, message),
            None if field.is_empty() => self.at(place, message),
            None => {
                let path = join(&place.path, field);
                self.0.push(Mistake {
                    path,
                    line: Some(place.node.line),
                    message: message.into(),
                });
            }
        }
    }

    fn expected<T>(&mut self, place: &Place<'_>, what: &str) -> Option<T> {
        self.at(
            place,
            format!("expected {what}, got {}", place.node.describe()),
        );
        None
    }
}

impl<'n> Place<'n> {
    pub(super) fn root(node: &'n Node) -> Self {
        Self {
            node,
            path: String::new(),
        }
    }

    /// The field of that name, if this is a map that has it.
    pub(super) fn field(&self, name: &str) -> Option<Self> {
        let Value::Map(entries) = &self.node.value else {
            return None;
        };
        let (_, node) = entries.iter().find(|(key, _)| key.text == name)?;
        Some(Self {
            node,
            path: join(&self.path, name),
        })
    }

    /// The field of that name, if it was written and is not null.
    pub(super) fn written(&self, name: &str) -> Option<Self> {
        self.field(name)
            .filter(|field| !matches!(field.node.value, Value::Null))
    }

    /// The entries, if this is a map.
    pub(super) fn entries(&self, mistakes: &mut Mistakes, what: &str) -> Vec<(&'n Key, Self)> {
        match &self.node.value {
            Value::Map(entries) => entries
                .iter()
                .map(|(key, node)| {
                    (
                        key,
                        Self {
                            node,
                            path: join(&self.path, &key.text),
                        },
                    )
                })
                .collect(),
            Value::Null => Vec::new(),
            _ => mistakes.expected(self, what).unwrap_or_default(),
        }
    }

    /// Checks that this is a map, and reports every key that is not in `known` with the nearest that is.
    pub(super) fn expect_keys(&self, known: &[&str], mistakes: &mut Mistakes) {
        for (key, value) in self.entries(mistakes, "a map") {
            if !known.contains(&key.text.as_str()) {
                let unknown = format!(
                    "unknown key `{}`; {}",
                    shortened(&key.text),
                    advice(&key.text, known)
                );
                mistakes.0.push(Mistake {
                    path: value.path,
                    line: Some(key.line),
                    message: unknown,
                });
            }
        }
    }

    pub(super) fn items(&self, mistakes: &mut Mistakes, what: &str) -> Vec<Self> {
        match &self.node.value {
            Value::List(items) => items
                .iter()
                .enumerate()
                .map(|(index, node)| Self {
                    node,
                    path: format!("{}[{index}]", self.path),
                })
                .collect(),
            Value::Null => Vec::new(),
            _ => mistakes.expected(self, what).unwrap_or_default(),
        }
    }

    /// The items of a list, or this itself where one value stands for a list of one.
    pub(super) fn one_or_more(&self, mistakes: &mut Mistakes) -> Vec<Self> {
        if let Value::List(_) = self.node.value {
            self.items(mistakes, "a list")
        } else {
            vec![self.clone()]
        }
    }

    pub(super) fn text(&self, mistakes: &mut Mistakes, what: &str) -> Option<&'n str> {
        match &self.node.value {
            Value::Scalar { text, .. } => Some(text),
            _ => mistakes.expected(self, what),
        }
    }

    pub(super) fn number(&self, mistakes: &mut Mistakes) -> Option<u64> {
        let what = format!("a whole number from 0 to {}", bounds::MAX_COUNT);
        match &self.node.value {
            Value::Scalar { text, plain: true } => match digits(text) {
                Some(number) if number <= bounds::MAX_COUNT => Some(number),
                _ => mistakes.expected(self, &what),
            },
            _ => mistakes.expected(self, &what),
        }
    }

    pub(super) fn truth(&self, mistakes: &mut Mistakes) -> Option<bool> {
        match &self.node.value {
            Value::Scalar { text, plain: true } if text == "true" => Some(true),
            Value::Scalar { text, plain: true } if text == "false" => Some(false),
            _ => mistakes.expected(self, "true or false"),
        }
    }

    pub(super) fn rate(&self, mistakes: &mut Mistakes) -> Option<Rate> {
        let text = self.text(mistakes, "a rate such as 20/min or 5/10s")?;
        notation::rate(text)
            .map_err(|error| mistakes.at(self, error.to_string()))
            .ok()
    }

    pub(super) fn span(&self, mistakes: &mut Mistakes) -> Option<Span> {
        let text = self.text(mistakes, "a duration such as 500ms, 20s or 1d")?;
        notation::span(text)
            .map_err(|error| mistakes.at(self, error.to_string()))
            .ok()
    }

    /// `10%`, or the number alone.
    pub(super) fn percent(&self, mistakes: &mut Mistakes) -> Option<u32> {
        let text = self.text(mistakes, "a percentage such as 10%")?;
        let number = digits(text.strip_suffix('%').unwrap_or(text))
            .and_then(|number| u32::try_from(number).ok());
        number.or_else(|| mistakes.expected(self, "a percentage such as 10%"))
    }

    /// A number of bytes: `1GiB`, `512MiB`, `65536`.
    pub(super) fn bytes(&self, mistakes: &mut Mistakes) -> Option<usize> {
        let what = "a size such as 64MiB or 1GiB";
        let text = self.text(mistakes, what)?;
        let units = [
            ("KiB", 1_u64 << 10),
            ("MiB", 1 << 20),
            ("GiB", 1 << 30),
            ("TiB", 1 << 40),
            ("", 1),
        ];
        let size = units.iter().find_map(|(unit, factor)| {
            digits(text.strip_suffix(unit)?.trim_end())?
                .checked_mul(*factor)
                .and_then(|size| usize::try_from(size).ok())
        });
        size.or_else(|| mistakes.expected(self, what))
    }

    /// An address and port, or `off`.
    pub(super) fn address(&self, mistakes: &mut Mistakes) -> Option<Option<SocketAddr>> {
        let what = "an address and port such as 127.0.0.1:8080, or off";
        match self.text(mistakes, what)? {
            "off" | "false" => Some(None),
            text => match text.parse() {
                Ok(address) => Some(Some(address)),
                Err(_) => mistakes.expected(self, what),
            },
        }
    }

    /// One of the words of `choices`.
    pub(super) fn choice<T: Clone>(
        &self,
        choices: &[(&str, T)],
        mistakes: &mut Mistakes,
    ) -> Option<T> {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let text = self.text(mistakes, &format!("one of {}", words.join(", ")))?;
        let found = choices
            .iter()
            .find(|(word, _)| *word == text)
            .map(|(_, choice)| choice.clone());
        if found.is_none() {
            mistakes.at(
                self,
                format!(
                    "unknown word `{}`; {}",
                    shortened(text),
                    advice(text, &words)
                ),
            );
        }
        found
    }
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() {
        shortened(field)
    } else {
        format!("{path}.{}", shortened(field))
    }
}

fn digits(text: &str) -> Option<u64> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_plain { text.parse().ok() } else { None }
}

/// The nearest known word, or all of them where none is near.
pub(crate) fn advice(word: &str, known: &[&str]) -> String {
    let near = known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min();
    match near {
        Some((_, candidate)) => format!("did you mean `{candidate}`?"),
        None => format!("known here: {}", known.join(", ")),
    }
}
