//! Parameters of limits that are sent with commands.

use tidegate_core::{Algorithm, Limit, LimitError, Limits, Rate, RefillMode, Span};

/// The parameters of a limit that is sent with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LimitParameters {
    pub(super) dialect: Dialect,
    /// The burst (GCRA) or the capacity (token bucket).
    pub(super) burst: u64,
    pub(super) count: u64,
    pub(super) period_secs: u64,
}

/// The program that defines the client's command. The dialect determines the algorithm and the
/// reply format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dialect {
    /// redis-cell's `CL.THROTTLE`, which admits `burst` + 1 requests at once.
    RedisCell,
    /// throttlecrab's `THROTTLE`, which admits `burst` requests at once.
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
