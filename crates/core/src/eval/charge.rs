//! A charge: the limits of one rule, applied to one key at a given cost.

use std::fmt;

use crate::{eval::Limits, limit::bounds, time::Span};

/// The cost of a charge in units of the limits: from 1 to [`bounds::MAX_COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(u64);

impl Cost {
    /// One unit, the cost of an ordinary request.
    pub const ONE: Self = Self(1);

    /// Creates a cost of `units`.
    ///
    /// # Errors
    ///
    /// Rejects 0 (use [`Effect::Look`] to read limits without a cost) and more than
    /// [`bounds::MAX_COUNT`].
    pub fn new(units: u64) -> Result<Self, RequestError> {
        if (1..=bounds::MAX_COUNT).contains(&units) {
            return Ok(Self(units));
        }
        Err(RequestError::new(
            "cost",
            format!("must be from 1 to {}, got {units}", bounds::MAX_COUNT),
        ))
    }

    /// Returns the cost in units.
    #[must_use]
    pub const fn units(self) -> u64 {
        self.0
    }
}

/// An error about a malformed request. The error names the invalid field and says what would be
/// valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The field of the request, such as `key`, `cost` or `entries.ip`.
    pub field: String,
    /// The problem, and a valid alternative.
    pub problem: String,
    /// The rule that makes the value wrong, such as `it is part of the key of rule "login"`. Do not
    /// send this cause to clients that must not know the rules.
    pub cause: Option<String>,
}

impl RequestError {
    /// Creates an error about `field`.
    #[must_use]
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
            cause: None,
        }
    }

    /// Adds the rule that causes the error.
    #[must_use]
    pub fn because(self, cause: impl Into<String>) -> Self {
        Self {
            cause: Some(cause.into()),
            ..self
        }
    }

    /// Removes the rule that causes the error.
    #[must_use]
    pub fn without_cause(self) -> Self {
        Self {
            cause: None,
            ..self
        }
    }

    /// Returns the problem, with its cause if there is one.
    #[must_use]
    pub fn explained(&self) -> String {
        match &self.cause {
            Some(cause) => format!("{}; {cause}", self.problem),
            None => self.problem.clone(),
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.explained())
    }
}

impl std::error::Error for RequestError {}

/// The limits of one rule, applied to one key at a given cost.
///
/// All limits of a rule share the key, so they also share one state and one lookup.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// The key. Two charges with equal key bytes share their state, so a rule's key begins with
    /// bytes that are unique to the rule.
    pub key: &'a [u8],
    /// The limits.
    pub limits: &'a Limits,
    /// The cost, the same for every limit.
    pub cost: Cost,
    /// The longest time that a queue may delay the request. A request that would wait longer is
    /// denied and does not enter the queue. With `None`, only the queue's capacity bounds the wait.
    pub longest_wait: Option<Span>,
}

impl<'a> Charge<'a> {
    /// Creates a charge on `key` without a maximum wait in queues.
    ///
    /// # Errors
    ///
    /// Rejects an empty key and a key longer than [`bounds::MAX_KEY_BYTES`].
    #[inline]
    pub fn new(key: &'a [u8], limits: &'a Limits, cost: Cost) -> Result<Self, RequestError> {
        if (1..=bounds::MAX_KEY_BYTES).contains(&key.len()) {
            Ok(Self {
                key,
                limits,
                cost,
                longest_wait: None,
            })
        } else {
            Err(unusable(key))
        }
    }
}

/// Returns true if two of `charges` have the same key.
///
/// A store reads all states before the decision and writes each state once after it. If a key
/// occurred twice, the second write would overwrite the first, so a store rejects such a call as a
/// whole.
#[must_use]
pub fn has_repeated_key(charges: &[Charge<'_>]) -> bool {
    let mut keys: Vec<&[u8]> = charges.iter().map(|charge| charge.key).collect();
    keys.sort_unstable();
    keys.windows(2).any(|pair| pair[0] == pair[1])
}

#[cold]
fn unusable(key: &[u8]) -> RequestError {
    let (len, most) = (key.len(), bounds::MAX_KEY_BYTES);
    let problem = match len {
        0 => "must not be empty".to_owned(),
        _ => format!("{len} bytes is over the maximum of {most}"),
    };
    RequestError::new("key", problem)
}

/// The effect of a decision on the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Charges the request if it is admitted.
    Charge,
    /// Charges nothing and returns the same result as [`Effect::Charge`].
    Peek,
    /// Charges nothing and reports the current state of the limits. The cost counts as 0, so
    /// nothing denies the request, not even a manual block.
    Look,
    /// Refunds the cost: the most recent charges first, and never more than was charged. No limit
    /// denies a refund, and every limit reports its state after the refund. The store can report
    /// that it is full only if the limits were changed since the charge and the converted state
    /// needs more memory.
    ///
    /// A refund needs no receipt, so a caller that may send refunds can bypass the limits. Accept a
    /// refund only from trusted callers that refund only their own charges, such as a proxy that
    /// learns the true cost afterwards.
    Refund,
}

impl Effect {
    /// Returns true if the limits are evaluated and may deny the request.
    #[must_use]
    #[inline]
    pub fn can_deny(self) -> bool {
        match self {
            Self::Charge | Self::Peek => true,
            Self::Look | Self::Refund => false,
        }
    }

    /// Returns true if the state may change.
    #[must_use]
    #[inline]
    pub fn can_write(self) -> bool {
        match self {
            Self::Charge | Self::Refund => true,
            Self::Peek | Self::Look => false,
        }
    }
}
