//! Typed access to the fields of a JSON body. Errors are collected together with their paths.

use std::{fmt, ops::RangeInclusive};

use tidegate_core::{
    Cost,
    bounds::MAX_COUNT,
    notation::{self, NotationError},
};
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

/// Describes an integer in `range`, for an error message.
pub(super) fn integer(range: RangeInclusive<u64>) -> String {
    format!(
        "must be an integer from {} to {}",
        range.start(),
        range.end()
    )
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
            _ => {
                let expected = "expected a non-negative integer";
                self.wrong_integer(expected, &(0..=MAX_COUNT), problems)
            }
        }
    }

    /// Reads an integer in `range`.
    pub(super) fn number_in(
        self,
        range: RangeInclusive<u64>,
        problems: &mut Vec<Problem>,
    ) -> Option<u64> {
        match self.value {
            Json::Whole(number) if range.contains(number) => Some(*number),
            _ => self.wrong_integer(&integer(range.clone()), &range, problems),
        }
    }

    pub(super) fn cost(self, problems: &mut Vec<Problem>) -> Option<Cost> {
        let units = self.number_in(1..=MAX_COUNT, problems)?;
        Cost::new(units).ok()
    }

    /// Reports a value that is not an integer in `range`. `1e3` and `1000.0` are not integers
    /// either, although they have the value of one.
    fn wrong_integer<T>(
        self,
        expected: &str,
        range: &RangeInclusive<u64>,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        let value = self.value.to_string();
        let meant = match self.value {
            Json::Number(_) => value.parse().ok(),
            Json::Text(text) => text.parse().ok().or_else(|| notation::integer_meant(text)),
            _ => None,
        };
        let problem = match (self.value, meant.filter(|meant| range.contains(meant))) {
            (_, None) => format!("{expected}, got {value}"),
            (Json::Text(_), Some(meant)) => {
                format!("{expected}, got {value}; write {meant} without quotes")
            }
            (_, Some(meant)) => {
                format!("{expected} without a decimal point or an exponent; write {meant}")
            }
        };
        self.wrong(problem, problems)
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
