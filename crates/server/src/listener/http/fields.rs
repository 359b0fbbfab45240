//! Typed access to the fields of a JSON body. Errors are collected together with their paths.

use std::fmt;

use tidegate_core::{Cost, notation::NotationError};
use tidegate_net::{Problem, json::Json};

/// The location of a field: in the body itself or in one of its `limits`.
#[derive(Clone, Copy, Debug)]
pub(super) enum FieldLocation {
    Body,
    Limit(usize),
}

/// Writes the prefix of a field's path, for example `limits[2].`. For a field of the body itself,
/// the prefix is empty.
impl fmt::Display for FieldLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Body => Ok(()),
            Self::Limit(index) => write!(f, "limits[{index}]."),
        }
    }
}

/// A field that is present in the body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'j, 'b> {
    pub(super) location: FieldLocation,
    pub(super) name: &'j str,
    pub(super) value: &'j Json<'b>,
}

impl<'j> Field<'j, '_> {
    pub(super) fn wrong<T>(
        self,
        problem: impl AsRef<str>,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        problems.push(Problem::bad(
            format!("{}{}", self.location, self.name),
            problem,
        ));
        None
    }

    pub(super) fn expected<T>(
        self,
        what: impl fmt::Display,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        self.wrong(format!("expected {what}, got {}", self.value), problems)
    }

    pub(super) fn number(self, problems: &mut Vec<Problem>) -> Option<u64> {
        match self.value {
            Json::Whole(number) => Some(*number),
            _ => self.expected_integer("a non-negative integer", 0.0, problems),
        }
    }

    pub(super) fn cost(self, problems: &mut Vec<Problem>) -> Option<Cost> {
        match self.value {
            Json::Whole(number) => match Cost::new(*number) {
                Ok(cost) => Some(cost),
                Err(error) => self.wrong(error.problem, problems),
            },
            _ => self.expected_integer("a positive integer", 1.0, problems),
        }
    }

    /// Reports a value that is not an integer from `lowest`. `1e3` and `1000.0` are not integers
    /// either, although they have the value of one.
    fn expected_integer<T>(
        self,
        what: &str,
        lowest: f64,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        match self.value {
            Json::Number(number) if number.fract() == 0.0 && (lowest..1e15).contains(number) => {
                self.wrong(
                    format!(
                        "expected {what} without a decimal point or an exponent; write {number}"
                    ),
                    problems,
                )
            }
            _ => self.expected(what, problems),
        }
    }

    pub(super) fn truth(self, problems: &mut Vec<Problem>) -> Option<bool> {
        match self.value {
            Json::Truth(truth) => Some(*truth),
            _ => self.expected("true or false", problems),
        }
    }

    pub(super) fn text(self, what: &str, problems: &mut Vec<Problem>) -> Option<&'j str> {
        match self.value {
            Json::Text(text) => Some(text),
            _ => self.expected(what, problems),
        }
    }

    /// Parses a string field with `parse`, whose error describes the expected value.
    pub(super) fn parsed<T>(
        self,
        what: &str,
        parse: impl FnOnce(&str) -> Result<T, NotationError>,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        match parse(self.text(what, problems)?) {
            Ok(parsed) => Some(parsed),
            Err(error) => self.wrong(error.to_string(), problems),
        }
    }

    /// Looks up the field's string in `choices`, and returns the corresponding value.
    pub(super) fn choice<T: Copy>(
        self,
        choices: &[(&str, T)],
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        let text = match self.value {
            Json::Text(text) => &**text,
            _ => "",
        };
        match choices.iter().find(|(word, _)| *word == text) {
            Some((_, choice)) => Some(*choice),
            None => {
                let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
                self.expected(format_args!("one of {}", words.join(", ")), problems)
            }
        }
    }

    /// Reads a percentage, such as `"10%"` or the number `10`.
    pub(super) fn percent(self, problems: &mut Vec<Problem>) -> Option<u32> {
        let percent = match self.value {
            Json::Text(text) => text
                .strip_suffix('%')
                .and_then(|digits| digits.parse().ok()),
            Json::Whole(number) => u32::try_from(*number).ok(),
            _ => None,
        };
        percent.or_else(|| self.expected("a percentage such as \"10%\"", problems))
    }
}
