//! Costs that depend on numbers in the request body, such as `max_tokens`.
//!
//! This crate does not read bodies. A listener that sees the body reads the numbers at the rule's
//! JSON pointers, and passes the cost to [`Request::with_body_costs`].
//!
//! [`Request::with_body_costs`]: super::Request::with_body_costs

use super::{RuleError, TokenUsage};
use crate::limit::bounds;

/// The assumed number of body bytes per input token, for estimates.
const BYTES_PER_TOKEN: u64 = 4;

/// A JSON pointer (RFC 6901) to a value in a JSON document.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JsonPointer {
    text: Box<str>,
    tokens: Box<[Box<str>]>,
}

impl JsonPointer {
    /// Parses a pointer such as `/max_tokens` or `/options/num_predict`.
    ///
    /// # Errors
    ///
    /// Returns an error for `cost` if `text` does not begin with a slash, has an invalid escape, is
    /// longer than [`bounds::MAX_ENTRY_NAME_BYTES`], or has more than
    /// [`bounds::MAX_POINTER_DEPTH`] tokens.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let wrong = |problem: String| RuleError::new("cost", problem);
        let Some(rest) = text.strip_prefix('/') else {
            let advice = "expected a JSON pointer, which begins with a slash, such as /max_tokens";
            return Err(wrong(advice.to_owned()));
        };
        if text.len() > bounds::MAX_ENTRY_NAME_BYTES {
            let (bytes, most) = (text.len(), bounds::MAX_ENTRY_NAME_BYTES);
            return Err(wrong(format!("{bytes} bytes exceed the maximum of {most}")));
        }
        let tokens: Option<Box<[Box<str>]>> = rest.split('/').map(unescape).collect();
        let Some(tokens) = tokens else {
            let advice = "in a JSON pointer, `~` is written as `~0`, and `/` in a name as `~1`";
            return Err(wrong(advice.to_owned()));
        };
        if tokens.len() > bounds::MAX_POINTER_DEPTH {
            let (depth, most) = (tokens.len(), bounds::MAX_POINTER_DEPTH);
            return Err(wrong(format!(
                "{depth} levels exceed the maximum of {most}"
            )));
        }
        Ok(Self {
            text: text.into(),
            tokens,
        })
    }

    /// Returns the pointer as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the field names and array indexes on the path from the root of the document to the
    /// value.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tokens.iter().map(|token| &**token)
    }
}

fn unescape(token: &str) -> Option<Box<str>> {
    let mut parts = token.split('~');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (escaped, rest) = part.split_at_checked(1)?;
        plain.push_str(match escaped {
            "0" => "~",
            "1" => "/",
            _ => return None,
        });
        plain.push_str(rest);
    }
    Some(plain.into())
}

/// The numbers in a request body from which the cost is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyNumbers {
    /// The largest number at a pointer in [`BodyCost::output`], if it is not 0.
    pub output: Option<u64>,
    /// The number at [`BodyCost::times`].
    pub times: Option<u64>,
    /// The length of the body in bytes.
    pub bytes: u64,
}

/// Describes how to compute a cost from a request body: the maximum number of output tokens, and
/// optionally an estimate of the input tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyCost {
    /// The pointers to the number of output tokens. If several numbers are present, the largest is
    /// used.
    pub output: Box<[JsonPointer]>,
    /// The pointer to the number of outputs. The number of output tokens is multiplied by the
    /// number at this pointer.
    pub times: Option<JsonPointer>,
    /// The number of output tokens if none of the pointers is present in a body, from 1 to `max`.
    pub default: u64,
    /// The largest number that a body may contain at one of the pointers, up to
    /// [`bounds::MAX_TOKENS`].
    pub max: u64,
    /// Whether the number of input tokens is estimated from the length of the body, as one token
    /// for every four bytes.
    pub estimates_input: bool,
}

impl BodyCost {
    /// Returns the maximum number of tokens that a request is expected to use, if its body contains
    /// `numbers`.
    #[must_use]
    pub fn expected(&self, numbers: BodyNumbers) -> TokenUsage {
        let output = numbers.output.unwrap_or(self.default);
        let input = if self.estimates_input {
            numbers.bytes.div_ceil(BYTES_PER_TOKEN)
        } else {
            0
        };
        TokenUsage {
            input,
            cached: 0,
            output: output.saturating_mul(numbers.times.unwrap_or(1)),
        }
    }

    pub(super) fn check(&self) -> Result<(), RuleError> {
        let wrong = |problem: String| Err(RuleError::new("cost", problem));
        if self.output.is_empty() {
            return wrong("must name at least one JSON pointer".to_owned());
        }
        if self.max == 0 || self.max > bounds::MAX_TOKENS {
            let most = bounds::MAX_TOKENS;
            return wrong(format!("max must be from 1 to {most}, got {}", self.max));
        }
        if self.default == 0 || self.default > self.max {
            let (default, max) = (self.default, self.max);
            return wrong(format!(
                "default must be from 1 to max, which is {max}, got {default}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_has_tokens() {
        let tokens = |text: &str| -> Vec<String> {
            let pointer = JsonPointer::parse(text).unwrap();
            assert_eq!(pointer.as_str(), text);
            pointer.tokens().map(str::to_owned).collect()
        };
        assert_eq!(tokens("/max_tokens"), ["max_tokens"]);
        assert_eq!(tokens("/a~1b/~0/0//~01"), ["a/b", "~", "0", "", "~1"]);
        let problem = |text: &str| JsonPointer::parse(text).unwrap_err().problem;
        assert!(problem("max_tokens").contains("begins with a slash"));
        assert!(problem("").contains("begins with a slash"));
        for escape in ["/~", "/~2", "/a~", "/~é"] {
            assert!(problem(escape).contains("`~0`"), "{escape}");
        }
        assert!(problem(&format!("/{}", "x".repeat(256))).contains("maximum of 256"));
        assert!(problem(&"/x".repeat(17)).contains("maximum of 16"));
    }

    #[test]
    fn expected_tokens_cover_the_input_and_every_output() {
        let cost = |estimates_input| BodyCost {
            output: [JsonPointer::parse("/max_tokens").unwrap()].into(),
            times: None,
            default: 100,
            max: 1_000,
            estimates_input,
        };
        let expected = |estimates_input, output, times| {
            let numbers = BodyNumbers {
                output,
                times,
                bytes: 401,
            };
            let usage = cost(estimates_input).expected(numbers);
            (usage.input, usage.cached, usage.output)
        };
        assert_eq!(expected(true, Some(30), None), (101, 0, 30));
        assert_eq!(expected(false, None, Some(3)), (0, 0, 300));
        assert_eq!(
            expected(false, Some(u64::MAX), Some(u64::MAX)),
            (0, 0, u64::MAX)
        );
    }

    #[test]
    fn incompatible_numbers_are_refused() {
        let problem = |default, max| {
            let cost = BodyCost {
                output: [JsonPointer::parse("/n").unwrap()].into(),
                times: None,
                default,
                max,
                estimates_input: false,
            };
            cost.check().err().map(|error| error.problem)
        };
        assert_eq!(problem(1, 1), None);
        assert!(problem(0, 5).unwrap().starts_with("default must"));
        assert!(problem(6, 5).unwrap().starts_with("default must"));
        assert!(problem(1, 0).unwrap().starts_with("max must"));
        assert!(problem(1, 1_000_000_001).unwrap().starts_with("max must"));
    }
}
