//! Rules: when a limit applies, and whose count it is.
use crate::{Charge, Cost, RequestError};

/// What asks to pass: the entries that describe it, and what it costs.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> { entries: &'a [(&'a str, &'a str)], cost: Cost }

impl<'a> Request<'a> {
    /// A request.
    ///
    /// # Errors
    ///
    /// Refuses too many entries, too long ones, an empty name, a name given twice.
    pub fn new(entries: &'a [(&'a str, &'a str)], cost: Cost) -> Result<Self, RequestError> { Ok(Self { entries, cost }) }
    /// The value of the entry `name`.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&'a str> { self.entries.iter().find(|(n, _)| *n == name).map(|(_, v)| *v) }
    /// The cost.
    #[must_use]
    pub fn cost(&self) -> Cost { self.cost }
}

/// Room for the keys of one request's charges, reused from request to request.
#[derive(Debug, Default)]
pub struct Scratch { }

/// Every rule, indexed by what it matches.
#[derive(Debug, Default)]
pub struct RuleSet {}

impl RuleSet {
    /// The charges that `request` is to pay: one for every rule that applies; none when it is on the allow list.
    ///
    /// # Errors
    ///
    /// Refuses a request whose key entry is empty or whose cost entry is no number.
    pub fn charges<'a>(&'a self, _request: &Request<'_>, _scratch: &'a mut Scratch) -> Result<Vec<Charge<'a>>, RequestError> { Ok(Vec::new()) }
}
