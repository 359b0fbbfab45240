//! Rate limits inside an application: a [`Limiter`] combines rules, a store and the [`Clock`].
//!
//! An application calls the limiter directly, or passes it as the [`Gate`] of a tower layer.

mod clock;
pub mod gate;
mod limiter;

pub use clock::Clock;
pub use gate::Gate;
pub use limiter::Limiter;
