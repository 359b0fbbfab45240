//! A charge: one rule's limits, applied to one key, at a cost.

use std::fmt;

use crate::{bounds, limits::Limits, time::Span};

/// What a charge asks for, in units of the limits: from 1 to [`bounds::MAX_COUNT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost(u64);

impl Cost {
    /// One unit: a plain request.
    pub const ONE: Self = Self(1);

    /// A cost of `units`.
    ///
    /// # Errors
    ///
    /// Refuses 0, which [`Effect::Look`] is for, and more than [`bounds::MAX_COUNT`].
    pub fn new(units: u64) -> Result<Self, RequestError> {
        if (1..=bounds::MAX_COUNT).contains(&units) {
            return Ok(Self(units));
        }
        Err(RequestError::new(
            "cost",
            format!("must be from 1 to {}, got {units}", bounds::MAX_COUNT),
        ))
    }

    /// The cost in units.
    #[must_use]
    pub const fn units(self) -> u64 {
        self.0
    }
}

/// A request that cannot be decided because it is malformed: which field it is, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The field of the request, such as `key`, `cost` or `entries.ip`.
    pub field: String,
    /// What is wrong and what to send instead.
    pub problem: String,
    /// Which rule makes it wrong, such as `rule "login" counts by it`. A client may not be meant to know.
    pub cause: Option<String>,
}

impl RequestError {
    /// A complaint about `field`.
    #[must_use]
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
            cause: None,
        }
    }

    /// The same complaint, caused by a rule.
    #[must_use]
    pub fn because(self, cause: impl Into<String>) -> Self {
        Self {
            cause: Some(cause.into()),
            ..self
        }
    }

    /// The same complaint without the rule that causes it.
    #[must_use]
    pub fn without_cause(self) -> Self {
        Self {
            cause: None,
            ..self
        }
    }

    /// What is wrong, with its cause if that is known.
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

/// One rule's limits, applied to one key, at a cost.
///
/// The limits of a rule share one key, and so one state and one lookup.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// Whose count it is. Two charges with equal bytes share their state, so the key of a rule begins
    /// with what sets the rule apart.
    pub key: &'a [u8],
    /// The limits.
    pub limits: &'a Limits,
    /// The cost, the same for every limit.
    pub cost: Cost,
    /// For how long a queue may hold it back: what would have to wait for longer is denied, and nobody stands in line who will not be
    /// served. `None` is as long as the queue is.
    pub longest_wait: Option<Span>,
}

impl<'a> Charge<'a> {
    /// A charge on `key`, which waits in queues for as long as they are.
    ///
    /// # Errors
    ///
    /// Refuses an empty key and one over [`bounds::MAX_KEY_BYTES`].
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

/// Whether two of `charges` have one key.
///
/// A store decides its charges on the states that it found before the call, and then writes each
/// state once. With one key twice, the second write would undo the first, so a store refuses such a
/// call as a whole.
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

/// What a decision does to the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Charges what is admitted.
    Charge,
    /// Charges nothing and answers what [`Effect::Charge`] would have answered.
    Peek,
    /// Charges nothing and answers how the limits stand: the cost is ignored, as if it were 0, and so nothing
    /// denies, a manual block included.
    Look,
    /// Gives the cost back, the newest spending first, and never more than was spent; no limit denies it, and all answer
    /// how they stand then. Only where the limits were changed since, so that the state takes another shape, can it find
    /// the store full.
    ///
    /// It takes no receipt: who may ask for it may pass as often as he likes. It is for callers that are trusted to
    /// give back only what they took, such as a proxy that learns the true cost afterwards.
    Refund,
}

impl Effect {
    /// Whether the limits are asked, and may deny.
    #[must_use]
    #[inline]
    pub fn asks(self) -> bool {
        match self {
            Self::Charge | Self::Peek => true,
            Self::Look | Self::Refund => false,
        }
    }

    /// Whether the state changes.
    #[must_use]
    #[inline]
    pub fn writes(self) -> bool {
        match self {
            Self::Charge | Self::Refund => true,
            Self::Peek | Self::Look => false,
        }
    }
}
