//! Rules from a control plane, received over Envoy's discovery protocol xDS.
//!
//! The client opens one stream of the aggregated discovery service, and subscribes to all resources
//! of the type `ratelimit.config.ratelimit.v3.RateLimitConfig`. The client uses the
//! state-of-the-world variant of xDS: each response contains all existing resources, so an absent
//! resource was removed.
//!
//! ```text
//! client                                             control plane
//!   ── version "",  nonce "",  node ────────────────────▶           first request of a stream
//!   ◀──────────────── version "7", nonce "a", resources ──
//!   ── version "7", nonce "a" ──────────────────────────▶           ACK: active
//!   ◀──────────────── version "8", nonce "b", resources ──
//!   ── version "7", nonce "b", error_detail ────────────▶           NACK: version 7 stays active
//! ```
//!
//! A response takes effect completely or not at all. A state-of-the-world client cannot accept only
//! some of the resources. In addition, a mixture of two versions could contain limits that were
//! never meant to be active together.

mod client;
mod connection;
mod resources;
mod response;
mod status;
mod wire;

pub use client::{InitialConfig, XdsClient};
pub use resources::{MAX_RESOURCE_DESCRIPTORS, MAX_RESOURCES, TYPE_URL};
