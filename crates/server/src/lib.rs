//! The doors around one limiter: configuration, HTTP, the Redis protocol, admin and metrics.

pub mod clock;
pub mod config;
pub mod door;
pub mod limiter;
pub mod net;
