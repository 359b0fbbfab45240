//! A charge: the limits of one rule, applied to one key at a given cost.

use std::fmt;

use crate::{
    eval::{BlockEnd, Limits},
    limit::bounds,
    time::Span,
};

/// The cost of a charge, in units: from 1 to [`bounds::MAX_COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(u64);

impl Cost {
    /// A cost of one unit, the cost of an ordinary request.
    pub const ONE: Self = Self(1);

    /// Creates a cost of `units`.
    ///
    /// # Errors
    ///
    /// Rejects 0 and numbers over [`bounds::MAX_COUNT`]. To read the state of the limits without
    /// charging a cost, use [`Effect::Look`].
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

/// An error about a malformed request. The error names the invalid field and a valid alternative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The request field, such as `key`, `cost` or `entries.ip`.
    pub field: String,
    /// The description of the problem, with a valid alternative.
    pub problem: String,
    /// The reason why the value is invalid. The text names the rule that requires a valid value,
    /// for example `this entry is part of the key of rule "login"`. Do not send the reason to
    /// clients that must not know the rules.
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

    /// Adds the cause of the error.
    #[must_use]
    pub fn because(self, cause: impl Into<String>) -> Self {
        Self {
            cause: Some(cause.into()),
            ..self
        }
    }

    /// Removes the cause of the error.
    #[must_use]
    pub fn without_cause(self) -> Self {
        Self {
            cause: None,
            ..self
        }
    }

    /// Returns the description of the problem, followed by the cause if there is one.
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
/// All limits of a rule have the same key, so their states are stored together and found with one
/// lookup.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// The key as bytes. Charges with equal key bytes share their state, so a rule's keys begin
    /// with bytes that are unique to the rule.
    pub key: &'a [u8],
    /// The limits.
    pub limits: &'a Limits,
    /// The cost, which is the same for all limits of the rule.
    pub cost: Cost,
    /// The longest time that a queueing limit may delay the request. A request that would wait
    /// longer is denied and does not enter the queue. If `None`, only the queue's capacity bounds
    /// the wait time.
    pub longest_wait: Option<Span>,
    /// The end of the [block by entries](crate::EntryBlocks) that denies this charge; `None` if
    /// there is no such block. A store denies a request with a blocked charge, and charges nothing.
    pub blocked: Option<BlockEnd>,
}

impl<'a> Charge<'a> {
    /// Creates a charge on `key` without a maximum wait time in queues.
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
                blocked: None,
            })
        } else {
            Err(unusable(key))
        }
    }
}

/// Returns true if two of `charges` have the same key.
///
/// A store reads all states before the decision and writes each state once afterwards. If a key
/// occurred twice, the second write would overwrite the first write. Therefore, a store rejects a
/// call with a repeated key.
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
        _ => format!("{len} bytes exceeds the maximum of {most}"),
    };
    RequestError::new("key", problem)
}

/// The effect of a decision on the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Charges the request if it is admitted.
    Charge,
    /// Charges nothing and returns the result that [`Effect::Charge`] would return.
    Peek,
    /// Charges nothing and reports the current state of the limits. The cost counts as 0, so the
    /// request is never denied, even if its key is blocked manually.
    Look,
    /// Refunds the cost, beginning with the most recent charges. A refund never exceeds the charged
    /// units. No limit denies a refund, and every outcome describes the state after the refund. The
    /// store rejects a refund only with [`Decision::Full`](crate::Decision::Full), and only if the
    /// limits were changed since the charge and the converted state needs more memory.
    ///
    /// A refund needs no receipt, so a caller that is allowed to send refunds can bypass the
    /// limits. Accept refunds only from trusted callers that refund only their own charges, such as
    /// a proxy that learns the true cost of a request from the response.
    Refund,
}

impl Effect {
    /// Returns true if the limits can deny the request.
    #[must_use]
    #[inline]
    pub fn can_deny(self) -> bool {
        match self {
            Self::Charge | Self::Peek => true,
            Self::Look | Self::Refund => false,
        }
    }

    /// Returns true if a decision with this effect can change the state.
    #[must_use]
    #[inline]
    pub fn can_write(self) -> bool {
        match self {
            Self::Charge | Self::Refund => true,
            Self::Peek | Self::Look => false,
        }
    }
}
