//! Instants and durations (spans) in whole microseconds.
//!
//! This crate never reads a clock. Every decision takes the current time `now` as an argument, and
//! the caller reads its clock once per request. Until the year 2255, both a `u64` in Rust and a
//! double in Lua represent an instant in microseconds exactly.

mod calendar;
pub(crate) mod notation;
mod span;
mod timestamp;
mod zone;

pub(crate) use self::zone::Zone;
pub use self::{
    calendar::{Calendar, CalendarUnit},
    span::{CLOCK_JUMP, MAX_PERIOD, Span},
    timestamp::Timestamp,
};
