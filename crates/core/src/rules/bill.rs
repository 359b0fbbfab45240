//! What a request is charged in the end, by what came of it.
//!
//! A limit is charged before a request passes, because afterwards it is too late to deny it. What only the answer tells, whether a
//! login has failed or how many tokens were used, comes later, and what was charged too much then comes back by
//! [receipt](crate::Receipt).

use super::{Request, Rule, RuleError, When, when::check_name};
use crate::{
    bounds,
    charge::Cost,
    limit::{Algorithm, Limit},
};

/// What a request is charged in the end, by the entries of its answer. The default charges what was charged before it passed.
///
/// # Examples
///
/// ```
/// use tidegate_core::{Bill, Condition, Cost, Pattern, Request, When};
///
/// let refused = Condition::new("status", Pattern::text("401").unwrap()).unwrap();
/// let bill = Bill::default().counting(When::all(vec![refused])).costing("tokens").unwrap();
///
/// let charged = Cost::new(100).unwrap();
/// let due = |answer: &[(&str, &str)]| bill.due(charged, &Request::new(answer, Cost::ONE).unwrap());
/// assert_eq!(due(&[("status", "200"), ("tokens", "12")]), 0);
/// assert_eq!(due(&[("status", "401"), ("tokens", "12")]), 12);
/// assert_eq!(due(&[("status", "401")]), 100);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Bill {
    counts: When,
    cost: Option<Box<str>>,
}

impl Bill {
    /// Counts only what is answered so that `answers` holds; all of what another answer was charged comes back.
    #[must_use]
    pub fn counting(mut self, answers: When) -> Self {
        self.counts = answers;
        self
    }

    /// Charges what the entry `name` of the answer says, a whole number in decimal digits; what was charged stays charged where
    /// the answer does not say so.
    ///
    /// # Errors
    ///
    /// Names `settle` if it is an entry that no answer can have.
    pub fn costing(mut self, name: &str) -> Result<Self, RuleError> {
        check_name(name).map_err(|error| RuleError::new("settle", error.problem))?;
        self.cost = Some(name.into());
        Ok(self)
    }

    /// Whether nothing depends on the answer.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.counts.is_always() && self.cost.is_none()
    }

    /// Whether an answer may say what it costs.
    pub(super) fn costs(&self) -> bool {
        self.cost.is_some()
    }

    /// The name of every entry of an answer that the bill looks at.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.counts.entry_names().chain(self.cost.as_deref())
    }

    /// What is due in the end, where `charged` was charged before, by the entries of the `answer`: from 0 to
    /// [`bounds::MAX_COUNT`].
    #[must_use]
    pub fn due(&self, charged: Cost, answer: &Request<'_>) -> u64 {
        self.due_so_far(charged, answer, |_| true)
    }

    /// The same for an answer that has broken off, of whose entries only those stay as they are that `is_final` says: what is
    /// counted by others counts, because nobody knows what they would have been, and who breaks off would choose it.
    #[must_use]
    pub fn due_so_far(
        &self,
        charged: Cost,
        answer: &Request<'_>,
        is_final: impl Fn(&str) -> bool,
    ) -> u64 {
        let mut known = self.counts.iter();
        if known.any(|condition| is_final(condition.entry()) && !condition.holds(answer)) {
            return 0;
        }
        let said = self.cost.as_deref().and_then(|name| answer.entry(name));
        said.and_then(units).unwrap_or_else(|| charged.units())
    }
}

/// What of a request's charges may come back.
impl Rule {
    /// Charges in the end what `bill` says of the answer. Only who sees answers can do so: the tower layer and the proxy.
    ///
    /// # Errors
    ///
    /// Names `count` or `settle` if a limit counts what is denied as well, of which nothing comes back; `count` if it has a
    /// schedule; and `settle` if it is about places, which are taken before and not afterwards.
    pub fn billed(mut self, bill: Bill) -> Result<Self, RuleError> {
        if !bill.is_settled() && self.limits().iter().any(Limit::count_denied) {
            let field = if bill.costs() { "settle" } else { "count" };
            let problem = "does not go with count_denied, of which nothing is given back; remove one of the two";
            return Err(RuleError::new(field, problem));
        }
        if bill.counts.schedule().is_some() {
            let problem =
                "counts by the answer, at whatever time; let the rule's `when` have the schedule";
            return Err(RuleError::new("count", problem));
        }
        if bill.costs() && self.holds_places() {
            let problem = "does not go with concurrency, whose places are taken before a request passes; use a rule for each";
            return Err(RuleError::new("settle", problem));
        }
        self.bill = bill;
        Ok(self)
    }

    /// What a request is charged in the end.
    #[must_use]
    pub fn bill(&self) -> &Bill {
        &self.bill
    }

    /// Whether a request holds a place until its answer has ended.
    #[must_use]
    pub fn holds_places(&self) -> bool {
        let holds = |limit: &Limit| matches!(limit.algorithm(), Algorithm::Concurrency { .. });
        self.limits().iter().any(holds)
    }

    /// Whether requests wait for their turn.
    #[must_use]
    pub fn queues(&self) -> bool {
        let queues = |limit: &Limit| {
            matches!(
                limit.algorithm(),
                Algorithm::LeakyBucket { queue: true, .. }
            )
        };
        self.limits().iter().any(queues)
    }

    /// Whether something of what a request was charged may come back.
    #[must_use]
    pub fn wants_receipt(&self) -> bool {
        self.holds_places() || self.queues() || !self.bill.is_settled()
    }
}

/// Whether it is a number: nothing but digits, no sign, no space, no exponent.
pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A number of units. One that is too large is the largest that there is.
fn units(text: &str) -> Option<u64> {
    let units = || text.parse().unwrap_or(bounds::MAX_COUNT);
    is_number(text).then(|| units().min(bounds::MAX_COUNT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        rules::{Condition, Days, Pattern, Schedule},
        time::Span,
    };

    fn due(said: &str) -> u64 {
        let bill = Bill::default().costing("tokens").unwrap();
        let answer = [("tokens", said)];
        bill.due(
            Cost::new(9).unwrap(),
            &Request::new(&answer, Cost::ONE).unwrap(),
        )
    }

    #[test]
    fn what_is_no_number_changes_nothing_and_what_is_too_large_is_the_largest() {
        for said in ["", "-1", "+1", " 1", "1e3", "1.5", "0x10", "\u{661}"] {
            assert_eq!(due(said), 9, "{said:?}");
        }
        assert_eq!((due("0"), due("007")), (0, 7));
        assert_eq!(due("99999999999999999999999999"), bounds::MAX_COUNT);
    }

    #[test]
    fn what_gives_nothing_back_is_billed_nothing() {
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
        let tokens = Bill::default().costing("tokens").unwrap();
        let failed = Condition::new("status", Pattern::text("5*").unwrap()).unwrap();
        let failed = Bill::default().counting(When::all(vec![failed]));
        let counted = limit(window.clone()).counting_denied(true);
        for (limit, bill, refused) in [
            (counted.clone(), &tokens, Some("settle")),
            (counted, &failed, Some("count")),
            (limit(places.clone()), &tokens, Some("settle")),
            (limit(places), &failed, None),
            (limit(window.clone()), &tokens, None),
            (limit(window), &failed, None),
        ] {
            let billed = rule(limit).billed(bill.clone());
            assert_eq!(billed.err().map(|error| error.field).as_deref(), refused);
        }
    }

    #[test]
    fn what_is_not_known_yet_counts() {
        let condition = |entry, text| Condition::new(entry, Pattern::text(text).unwrap()).unwrap();
        let conditions = vec![condition("status", "200"), condition("grpc-status", "0")];
        let bill = Bill::default().counting(When::all(conditions));
        let due = |answer: &[(&str, &str)]| {
            let answer = Request::new(answer, Cost::ONE).unwrap();
            let is_final = |name: &str| answer.entry(name).is_some();
            bill.due_so_far(Cost::new(9).unwrap(), &answer, is_final)
        };
        assert_eq!(due(&[("status", "200")]), 9);
        assert_eq!(due(&[("status", "500")]), 0);
        assert_eq!(due(&[("status", "200"), ("grpc-status", "13")]), 0);
        assert_eq!(due(&[]), 9);
    }

    #[test]
    fn an_answer_counts_at_whatever_time() {
        let limit = Limit::new(Algorithm::SlidingWindowLog {
            limit: 1,
            window: Span::from_secs(1),
        });
        let rule = Rule::new("rule", vec![limit.unwrap()]).unwrap();
        let night = Schedule::new(Vec::new(), Days::ALL, "UTC").unwrap();
        let bill = Bill::default().counting(When::default().during(night));
        assert_eq!(rule.billed(bill).unwrap_err().field, "count");
    }

    #[test]
    fn an_entry_has_a_name() {
        assert_eq!(Bill::default().costing("").unwrap_err().field, "settle");
        assert!(Bill::default().is_settled());
        assert!(!Bill::default().costing("bytes").unwrap().is_settled());
    }
}
