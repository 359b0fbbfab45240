//! The HTTP door over real sockets, on a clock that stands still until it is set.

mod authorize;
mod bad_input;
mod check;
mod door;
mod throttle;
mod wire;
