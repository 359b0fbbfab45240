//! The same decision, made inside Redis or Valkey, for a fleet that shares its counts.
//!
//! A [`RedisStore`] answers what the memory store answers, field by field, on the server's clock. One script a
//! decision: it reads the states of all keys, decides, and charges all or none; nothing else ever writes to them.
//! The host multiplies, the script adds, carries and compares; it answers with the states that it found, and
//! [`tidegate_core::remote`] computes from them every number that a caller sees.
//!
//! - **One key a rule and subject.** All limits of a rule lie in one value. Rules that count by the same values share a hash
//!   tag, and so a slot of a cluster.
//! - **Every key expires by itself**, never before its state means nothing more; only a block that stands until it is lifted
//!   stands for ever.
//! - **One clock.** The server's `TIME`, read once a decision. A clock that goes back mints nothing: a state from later counts
//!   in full until the clock has caught up.
//! - **Changed numbers keep counts.** A value names the limits that left it. Where they are others, the host takes the state
//!   over as the memory store does, and writes it back if nothing changed meanwhile.

mod amend;
mod blocks;
mod call;
mod connect;
mod decode;
mod encode;
mod error;
mod exec;
mod layout;
mod scripts;
mod store;

pub use self::{
    connect::{Address, ConnectError, Health, Login, Redis, Settings, Tls, Topology, Transport},
    error::StoreError,
    store::RedisStore,
};
