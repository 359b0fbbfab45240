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
//! - **Changed numbers keep counts.** A value says what its states are counted in. Where that is other than the charge's, the host converts
//!   the state as the memory store does, and the script decides on that if nothing changed meanwhile.
//!
//! # What it costs
//!
//! CPU of the server a call, 64 in a pipeline, 100,000 random keys, medians of one run on two shared cores (Redis 7.0.15 /
//! Valkey 9.1.2); the best exact script alone is one that reads `TIME`, `GET`s, and writes with `PSETEX`, and does nothing else:
//!
//! | decision | µs |
//! | --- | --- |
//! | the best exact script alone, GCRA | 4.9 / 4.8 |
//! | one schedule (`gcra`, `token_bucket`, `leaky_bucket`) | 4.7 / 4.8 |
//! | four schedules on one key | 6.8 / 6.9 |
//! | one fixed window; weighted; 10 buckets | 10.2 / 12.3; 10.0 / 10.4; 11.0 / 14.3 |
//! | one log of 60; four windows over one log of up to 800 | 12.2 / 19.9; 21.5 / 22.7 |
//!
//! In Redis a schedule takes 88 bytes by `MEMORY USAGE` under a key of 16 bytes, and 145 of the server's memory with its
//! places in the tables of keys and of expiries (`docs/fleet.md` has what takes them); 100,000 logs of 60 requests take 77 MB.
//!
//! A log takes 10 bytes a request. A rule of nothing but log limits that count nothing that they deny reads and writes a few places
//! of it, however long it is; a log among other algorithms, one that counts denials, and every peek read it whole: `docs/fleet.md`
//! has what that costs.

mod alone;
mod amend;
mod apart;
mod blocks;
mod call;
mod connect;
mod decode;
mod encode;
mod error;
mod exec;
mod fleet;
mod layout;
mod places;
mod reserve;
mod scripts;
mod store;
mod wary;

pub use self::{
    connect::{Address, ConnectError, Health, Login, Redis, Settings, Tls, Topology, Transport},
    error::StoreError,
    fleet::{Fleet, FleetReceipt, FleetSettings, FleetStats, NodeShare},
    reserve::RedisReceipt,
    store::RedisStore,
};
