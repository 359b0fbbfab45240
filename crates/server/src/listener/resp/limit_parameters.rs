//! The parameters of a limit that is sent with a command.

use tidegate_core::{Algorithm, Limit, LimitError, Limits, Rate, RefillMode, Span};

/// The parameters of a limit that is sent with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LimitParameters {
    pub(super) dialect: Dialect,
    /// The burst of GCRA or the capacity of a bucket.
    pub(super) burst: u64,
    pub(super) count: u64,
    pub(super) period_secs: u64,
}

/// The program whose command the client uses, which determines the algorithm and the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dialect {
    /// `CL.THROTTLE`, which allows `burst` simultaneous requests in addition to the regular one.
    RedisCell,
    /// `THROTTLE`, which allows `burst` simultaneous requests.
    Throttlecrab,
}

impl LimitParameters {
    pub(super) fn compile(self) -> Result<Limits, LimitError> {
        let rate = Rate {
            count: self.count,
            period: Span::from_secs(self.period_secs),
        };
        let algorithm = match self.dialect {
            Dialect::RedisCell => Algorithm::Gcra {
                rate,
                burst: self.burst,
            },
            Dialect::Throttlecrab => Algorithm::TokenBucket {
                capacity: self.burst,
                refill: rate,
                mode: RefillMode::Continuous,
            },
        };
        Limits::new(vec![Limit::new(algorithm)?])
    }
}
