//! Response-based cost: the final charge of a request is computed from its response.
//!
//! A limit must be charged before the request is forwarded, because a forwarded request can no
//! longer be denied. However, only the response shows, for example, whether a login failed or how
//! many tokens were used. Once the response is known, the difference between the initial and the
//! final charge is refunded with the [receipt](crate::Receipt).

use super::{
    ActiveHours, Request, RuleError, TokenFormula, TokenUsage, When, condition::check_name,
};
use crate::{eval::Cost, limit::bounds};

/// The final charge of a request, computed from the entries of its response. The default keeps the
/// initial charge.
///
/// # Examples
///
/// ```
/// use tidegate_core::{ResponseCost, Condition, Cost, Pattern, Request, When};
///
/// let refused = Condition::new("status", Pattern::text("401").unwrap()).unwrap();
/// let cost = ResponseCost::default().counting(When::all(vec![refused]));
/// let cost = cost.costing("tokens").unwrap();
///
/// let charged = Cost::new(100).unwrap();
/// let final_charge = |response: &[(&str, &str)]| {
///     cost.final_charge(charged, &Request::new(response, Cost::ONE).unwrap())
/// };
/// assert_eq!(final_charge(&[("status", "200"), ("tokens", "12")]), 0);
/// assert_eq!(final_charge(&[("status", "401"), ("tokens", "12")]), 12);
/// assert_eq!(final_charge(&[("status", "401")]), 100);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseCost {
    counts: When,
    cost: Option<FinalCost>,
}

/// The response entries with the numbers of tokens used by a language model: [`TokenUsage::input`],
/// [`TokenUsage::cached`] and [`TokenUsage::output`].
pub const USAGE_ENTRIES: [&str; 3] = ["usage.input", "usage.cached", "usage.output"];

/// The source of the final charge.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FinalCost {
    /// The number in the response entry with this name.
    Entry(Box<str>),
    /// The cost of the tokens in the [`USAGE_ENTRIES`].
    Usage(TokenFormula),
}

impl ResponseCost {
    /// Counts only requests whose response matches `answers`. The charge for any other request is
    /// refunded completely.
    #[must_use]
    pub fn counting(mut self, answers: When) -> Self {
        self.counts = answers;
        self
    }

    /// Charges the number in the response entry `name`, an integer in decimal digits. If the entry
    /// is missing or is not a number, the initial charge stays.
    ///
    /// # Errors
    ///
    /// Returns an error for `settle` if `name` is not a valid entry name.
    pub fn costing(mut self, name: &str) -> Result<Self, RuleError> {
        check_name(name).map_err(|error| RuleError::new("settle", error.problem))?;
        self.cost = Some(FinalCost::Entry(name.into()));
        Ok(self)
    }

    /// Charges the cost that `formula` computes from the tokens in the [`USAGE_ENTRIES`]. If all of
    /// these entries are missing, the initial charge stays. A single missing entry counts as 0.
    ///
    /// # Examples
    ///
    /// ```
    /// use tidegate_core::{Cost, Request, ResponseCost, TokenFormula};
    ///
    /// let formula = TokenFormula::parse("input + 4*output").unwrap();
    /// let cost = ResponseCost::default().costing_usage(formula);
    /// let response = [("usage.input", "12"), ("usage.output", "5")];
    /// let response = Request::new(&response, Cost::ONE).unwrap();
    /// assert_eq!(cost.final_charge(Cost::new(1_000).unwrap(), &response), 32);
    /// ```
    #[must_use]
    pub fn costing_usage(mut self, formula: TokenFormula) -> Self {
        self.cost = Some(FinalCost::Usage(formula));
        self
    }

    /// Returns the token formula, if it was set with [`Self::costing_usage`].
    #[must_use]
    pub fn formula(&self) -> Option<&TokenFormula> {
        match &self.cost {
            Some(FinalCost::Usage(formula)) => Some(formula),
            Some(FinalCost::Entry(_)) | None => None,
        }
    }

    /// Returns true if the charge does not depend on the response.
    #[must_use]
    pub fn is_independent_of_response(&self) -> bool {
        self.counts.is_always() && self.cost.is_none()
    }

    /// Returns true if the final charge is the length of the response's body.
    #[must_use]
    pub fn is_length(&self) -> bool {
        matches!(&self.cost, Some(FinalCost::Entry(name)) if &**name == "bytes")
    }

    /// Returns true if the final charge is computed from numbers in response entries.
    pub(super) fn has_cost(&self) -> bool {
        self.cost.is_some()
    }

    /// Returns the schedule of the condition that selects which responses are counted.
    pub(super) fn schedule(&self) -> Option<&ActiveHours> {
        self.counts.schedule()
    }

    /// Returns the names of all response entries on which the final charge depends.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        let (entry, usage): (Option<&str>, &[&str]) = match &self.cost {
            Some(FinalCost::Entry(name)) => (Some(name), &[]),
            Some(FinalCost::Usage(_)) => (None, &USAGE_ENTRIES),
            None => (None, &[]),
        };
        let cost = entry.into_iter().chain(usage.iter().copied());
        self.counts.entry_names().chain(cost)
    }

    /// Returns the final charge, from 0 to [`bounds::MAX_COUNT`], for a request whose initial
    /// charge was `charged`. `response` contains the entries of the response.
    #[must_use]
    pub fn final_charge(&self, charged: Cost, response: &Request<'_>) -> u64 {
        self.final_charge_if_aborted(charged, response, |_| true)
    }

    /// Returns the final charge for an aborted response. Only entries for which `is_final` returns
    /// true have their final value. A condition on any other entry counts as fulfilled, because the
    /// final value of that entry is unknown. If such a condition did not count as fulfilled, a
    /// client could avoid the charge by aborting the response.
    #[must_use]
    pub fn final_charge_if_aborted(
        &self,
        charged: Cost,
        response: &Request<'_>,
        is_final: impl Fn(&str) -> bool,
    ) -> u64 {
        let mut known = self.counts.iter();
        if known.any(|condition| is_final(condition.entry()) && !condition.holds(response)) {
            return 0;
        }
        let cost = self.cost.as_ref().and_then(|cost| cost.of(response));
        cost.unwrap_or_else(|| charged.units())
    }
}

impl FinalCost {
    /// Returns the final charge, if the response contains it.
    fn of(&self, response: &Request<'_>) -> Option<u64> {
        match self {
            Self::Entry(name) => response.entry(name).and_then(units),
            Self::Usage(formula) => {
                let tokens = USAGE_ENTRIES.map(|name| response.entry(name).and_then(units));
                tokens.iter().flatten().next()?;
                let [input, cached, output] = tokens.map(Option::unwrap_or_default);
                Some(formula.cost(TokenUsage {
                    input,
                    cached,
                    output,
                }))
            }
        }
    }
}

/// Returns true if the string consists only of ASCII digits, without a sign, a space or an
/// exponent.
pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Parses a number of units. Returns [`bounds::MAX_COUNT`] for a larger number.
fn units(text: &str) -> Option<u64> {
    let units = || text.parse().unwrap_or(bounds::MAX_COUNT);
    is_number(text).then(|| units().min(bounds::MAX_COUNT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        limit::{Algorithm, Limit},
        rules::{ActiveHours, Condition, Days, Pattern, Rule},
        time::Span,
    };

    fn final_charge(value: &str) -> u64 {
        let response_cost = ResponseCost::default().costing("tokens").unwrap();
        let response = [("tokens", value)];
        response_cost.final_charge(
            Cost::new(9).unwrap(),
            &Request::new(&response, Cost::ONE).unwrap(),
        )
    }

    #[test]
    fn an_invalid_cost_is_ignored_and_a_large_cost_is_capped() {
        for value in ["", "-1", "+1", " 1", "1e3", "1.5", "0x10", "\u{661}"] {
            assert_eq!(final_charge(value), 9, "{value:?}");
        }
        assert_eq!((final_charge("0"), final_charge("007")), (0, 7));
        assert_eq!(
            final_charge("99999999999999999999999999"),
            bounds::MAX_COUNT
        );
    }

    #[test]
    fn incompatible_limits_and_response_costs_are_refused() {
        let limit = |algorithm| Limit::new(algorithm).unwrap();
        let rule = |limit| Rule::new("rule", vec![limit]).unwrap();
        let second = Span::from_secs(1);
        let (places, window) = (
            Algorithm::Concurrency {
                limit: 1,
                lease: second,
            },
            Algorithm::SlidingWindowLog {
                limit: 1,
                window: second,
            },
        );
        let tokens = ResponseCost::default().costing("tokens").unwrap();
        let failed = Condition::new("status", Pattern::text("5*").unwrap()).unwrap();
        let failed = ResponseCost::default().counting(When::all(vec![failed]));
        let counted = limit(window.clone()).counting_denied(true);
        for (limit, response_cost, refused) in [
            (counted.clone(), &tokens, Some("settle")),
            (counted, &failed, Some("count")),
            (limit(places.clone()), &tokens, Some("settle")),
            (limit(places), &failed, None),
            (limit(window.clone()), &tokens, None),
            (limit(window), &failed, None),
        ] {
            let with_response_cost = rule(limit).with_response_cost(response_cost.clone());
            assert_eq!(
                with_response_cost.err().map(|error| error.field).as_deref(),
                refused
            );
        }
    }

    #[test]
    fn an_undecided_condition_counts() {
        let condition = |entry, text| Condition::new(entry, Pattern::text(text).unwrap()).unwrap();
        let conditions = vec![condition("status", "200"), condition("grpc-status", "0")];
        let response_cost = ResponseCost::default().counting(When::all(conditions));
        let final_charge = |response: &[(&str, &str)]| {
            let response = Request::new(response, Cost::ONE).unwrap();
            let is_final = |name: &str| response.entry(name).is_some();
            response_cost.final_charge_if_aborted(Cost::new(9).unwrap(), &response, is_final)
        };
        assert_eq!(final_charge(&[("status", "200")]), 9);
        assert_eq!(final_charge(&[("status", "500")]), 0);
        assert_eq!(final_charge(&[("status", "200"), ("grpc-status", "13")]), 0);
        assert_eq!(final_charge(&[]), 9);
    }

    #[test]
    fn a_response_condition_has_no_schedule() {
        let limit = Limit::new(Algorithm::SlidingWindowLog {
            limit: 1,
            window: Span::from_secs(1),
        });
        let rule = Rule::new("rule", vec![limit.unwrap()]).unwrap();
        let night = ActiveHours::new(Vec::new(), Days::ALL, "UTC").unwrap();
        let response_cost = ResponseCost::default().counting(When::default().during(night));
        assert_eq!(
            rule.with_response_cost(response_cost).unwrap_err().field,
            "count"
        );
    }

    #[test]
    fn an_entry_has_a_name() {
        assert_eq!(
            ResponseCost::default().costing("").unwrap_err().field,
            "settle"
        );
        assert!(ResponseCost::default().is_independent_of_response());
        assert!(
            !ResponseCost::default()
                .costing("bytes")
                .unwrap()
                .is_independent_of_response()
        );
    }
}
