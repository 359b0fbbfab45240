//! Alternatives: a list of patterns, at least one of which must match.

use foldhash::HashSet;

use super::{
    Pattern,
    index::{Index, Item, Matches},
    work::{Effort, Work},
};

/// The minimum number of alternatives for building an index, not counting exact values.
const INDEXED_FROM: usize = 8;

/// A list of patterns, at least one of which must match. Exact values are in a hash set, so that a
/// long list of values needs only one lookup. Other patterns are indexed if there are many of them.
#[derive(Clone, Debug)]
pub(in crate::rules) struct Alternatives {
    exact: HashSet<Box<str>>,
    others: Box<[Pattern]>,
    index: Option<Index>,
}

impl PartialEq for Alternatives {
    fn eq(&self, other: &Self) -> bool {
        self.exact == other.exact && self.others == other.others
    }
}

impl Alternatives {
    pub(in crate::rules) fn new(exact: HashSet<Box<str>>, others: Vec<Pattern>) -> Self {
        let is_long = others.len() >= INDEXED_FROM;
        let index = is_long.then(|| Index::new(others.iter().map(Item::alternative)));
        Self {
            exact,
            others: others.into(),
            index,
        }
    }

    pub(in crate::rules) fn exact(&self) -> impl ExactSizeIterator<Item = &Box<str>> {
        self.exact.iter()
    }

    pub(in crate::rules) fn others(&self) -> &[Pattern] {
        &self.others
    }

    pub(in crate::rules) fn evaluate(&self, value: Option<&str>, work: &mut Work) -> bool {
        if !work.spend(Effort::Constant, value) {
            return false;
        }
        if value.is_some_and(|value| self.exact.contains(value)) {
            return true;
        }
        let Some(index) = &self.index else {
            return self
                .others
                .iter()
                .any(|pattern| pattern.evaluate(value, work));
        };
        let mut matches = Matches::default();
        index.look_up_value(value, &mut matches);
        work.expect(matches.items.len());
        let mut found = matches.items.iter();
        found.any(|at| self.others[*at].evaluate(value, work))
    }

    /// Returns the maximum number of pattern evaluations for matching one value.
    pub(in crate::rules) fn weight(&self) -> usize {
        let others = match &self.index {
            Some(index) => index.costliest().weight,
            None => self
                .others
                .iter()
                .map(Pattern::weight)
                .fold(0, usize::saturating_add),
        };
        others.saturating_add(1)
    }
}
