//! Token formulas: compute the cost of a request to a language model from its tokens.

use super::RuleError;
use crate::{limit::bounds, shown::shown};

/// The maximum number of decimals in a weight.
const DECIMALS: usize = 6;

/// The weight 1. Weights are in millionths, so that the arithmetic is exact.
const ONE: u64 = 1_000_000;

/// The token counts of a request to a language model. Each token is in exactly one of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TokenUsage {
    /// The input tokens that the model did not read from its prompt cache.
    pub input: u64,
    /// The input tokens that the model read from its prompt cache.
    pub cached: u64,
    /// The output tokens, including reasoning tokens.
    pub output: u64,
}

/// A weighted sum of a request's tokens, such as `input + 0.1*cached + 4*output`.
///
/// # Examples
///
/// ```
/// use tidegate_core::{TokenFormula, TokenUsage};
///
/// let formula = TokenFormula::parse("input + 0.1*cached + 4*output").unwrap();
/// let usage = TokenUsage { input: 7, cached: 1_001, output: 12 };
/// assert_eq!(formula.cost(usage), 156); // 7 + 100.1 + 48, rounded up
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenFormula {
    // The weights, in millionths.
    input: u64,
    cached: u64,
    output: u64,
}

impl TokenFormula {
    /// The formula `input + cached + output`: the number of all tokens.
    pub const SUM: Self = Self {
        input: ONE,
        cached: ONE,
        output: ONE,
    };

    /// Parses a sum of the terms `input`, `cached` and `output`. A term can have a weight with at
    /// most six decimals, such as `0.1*cached`. If a kind of token has no term, its tokens cost
    /// nothing.
    ///
    /// # Errors
    ///
    /// Returns an error for `settle` if `text` is not a formula.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        let wrong = |problem: String| RuleError::new("settle", problem);
        if text.len() > bounds::MAX_PATTERN_BYTES {
            let most = bounds::MAX_PATTERN_BYTES;
            return Err(wrong(format!(
                "{} bytes exceed the maximum of {most}",
                text.len()
            )));
        }
        let mut weights: [Option<u64>; 3] = [None; 3];
        for term in text.split('+').map(str::trim) {
            let (weight, name) = match term.split_once('*') {
                Some((weight, name)) => (parse_weight(weight.trim()).map_err(wrong)?, name.trim()),
                None => (ONE, term),
            };
            let at = match name {
                "input" => 0,
                "cached" => 1,
                "output" => 2,
                _ => {
                    return Err(wrong(format!(
                        "expected a sum such as `input + 0.1*cached + 4*output`, but the term \"{}\" is not \
                         `input`, `cached` or `output`, with or without a weight before it",
                        shown(term)
                    )));
                }
            };
            if weights[at].replace(weight).is_some() {
                return Err(wrong(format!("`{name}` occurs twice; add its weights")));
            }
        }
        let [input, cached, output] = weights.map(Option::unwrap_or_default);
        if input == 0 && cached == 0 && output == 0 {
            return Err(wrong(
                "charges nothing, because all weights are 0".to_owned(),
            ));
        }
        Ok(Self {
            input,
            cached,
            output,
        })
    }

    /// Returns the cost of `usage`, rounded up, and at most [`bounds::MAX_COUNT`].
    #[must_use]
    pub fn cost(&self, usage: TokenUsage) -> u64 {
        // A weight is at most 10^12 millionths, and a token count is below 2^64, so the sum fits in
        // a `u128`.
        let term = |weight: u64, tokens: u64| u128::from(weight) * u128::from(tokens);
        let sum = term(self.input, usage.input)
            + term(self.cached, usage.cached)
            + term(self.output, usage.output);
        let cost = sum.div_ceil(u128::from(ONE));
        u64::try_from(cost).map_or(bounds::MAX_COUNT, |cost| cost.min(bounds::MAX_COUNT))
    }
}

/// Parses a decimal number with at most six decimals. Returns the number in millionths.
fn parse_weight(text: &str) -> Result<u64, String> {
    let most = bounds::MAX_TOKEN_WEIGHT;
    let wrong = || {
        format!(
            "the weight \"{}\" is not a number from 0 to {most} with at most {DECIMALS} decimals, such as 4 or 0.1",
            shown(text)
        )
    };
    let (whole, part) = match text.split_once('.') {
        Some((whole, part)) => (whole, Some(part)),
        None => (text, None),
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let part = part.unwrap_or("0");
    if !is_number(whole) || !is_number(part) || part.len() > DECIMALS {
        return Err(wrong());
    }
    let whole: u64 = whole.parse().map_err(|_| wrong())?;
    // The fraction has at most six digits, so it is at most 999,999 after it is padded with zeros.
    let millionths: u64 = format!("{part:0<DECIMALS$}").parse().map_err(|_| wrong())?;
    let weight = whole
        .checked_mul(ONE)
        .and_then(|whole| whole.checked_add(millionths))
        .filter(|weight| *weight <= most * ONE);
    weight.ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problem(text: &str) -> String {
        TokenFormula::parse(text).unwrap_err().problem
    }

    fn cost(formula: &str, input: u64, cached: u64, output: u64) -> u64 {
        TokenFormula::parse(formula).unwrap().cost(TokenUsage {
            input,
            cached,
            output,
        })
    }

    #[test]
    fn a_formula_is_a_weighted_sum() {
        assert_eq!(cost("input + 0.1*cached + 4*output", 100, 50, 10), 145);
        assert_eq!(cost("output", 100, 50, 10), 10);
        assert_eq!(cost(" 4 * output+input ", 1, 9, 2), 9);
        assert_eq!(cost("0*input + 1.000000*output", 100, 50, 10), 10);
        assert_eq!(
            TokenFormula::parse("input + cached + output").unwrap(),
            TokenFormula::SUM
        );
    }

    #[test]
    fn a_cost_rounds_up_and_saturates() {
        assert_eq!(cost("0.000001*input", 1, 0, 0), 1);
        assert_eq!(cost("0.000001*input", 1_000_001, 0, 0), 2);
        assert_eq!(cost("0.1*cached", 0, 10, 0), 1);
        assert_eq!(cost("0.1*cached", 0, 0, 0), 0);
        assert_eq!(cost("1000000*output", 0, 0, u64::MAX), bounds::MAX_COUNT);
    }

    #[test]
    fn mistakes_in_a_formula_are_named() {
        for (text, expected) in [
            ("", "the term \"\""),
            ("input +", "the term \"\""),
            ("input - cached", "the term \"input - cached\""),
            ("inputs", "the term \"inputs\""),
            ("output*4", "the weight \"output\""),
            ("4*4*output", "the term \"4*4*output\""),
            ("1e3*input", "the weight \"1e3\""),
            ("-1*input", "the weight \"-1\""),
            (".5*input", "the weight \".5\""),
            ("5.*input", "the weight \"5.\""),
            ("0.1234567*input", "at most 6 decimals"),
            ("1000000.000001*input", "from 0 to 1000000"),
            ("99999999999999999999*input", "from 0 to 1000000"),
            ("input + 2*input", "`input` occurs twice"),
            ("0*input + 0.0*output", "all weights are 0"),
        ] {
            assert!(
                problem(text).contains(expected),
                "{text}: {}",
                problem(text)
            );
        }
        assert!(problem(&"input+".repeat(400)).contains("exceed the maximum"));
    }

    proptest! {
        #[test]
        fn a_cost_is_the_exact_sum_rounded_up(
            weights in prop::array::uniform3(0_u64..10_000_000),
            tokens in prop::array::uniform3(0_u64..1_000_000),
        ) {
            let decimal = |weight: u64| format!("{}.{:06}", weight / ONE, weight % ONE);
            let [input, cached, output] = weights.map(decimal);
            let text = format!("{input}*input+{cached} *cached + {output}* output");
            prop_assume!(weights.iter().any(|weight| *weight > 0));
            let exact: u128 = weights
                .iter()
                .zip(tokens)
                .map(|(weight, tokens)| u128::from(*weight) * u128::from(tokens))
                .sum();
            let cost = u128::from(cost(&text, tokens[0], tokens[1], tokens[2]));
            prop_assert!(cost * 1_000_000 >= exact);
            prop_assert!(cost == 0 || (cost - 1) * 1_000_000 < exact);
        }
    }
}
