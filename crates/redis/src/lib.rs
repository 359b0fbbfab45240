//! Rate-limit decisions made inside Redis or Valkey, for a fleet of servers that share their
//! counters.
//!
//! A [`RedisStore`] makes the same decisions as the in-memory store, with the same value in every
//! field. However, a `RedisStore` uses the clock of the Redis server. Each decision is one call of
//! a Lua script. The script reads the states of all keys, decides, and charges either all keys or
//! none. Only the scripts write to the keys of states. The client does all multiplications in
//! advance, so that the script only adds, carries and compares. The script returns the states that
//! it has read, and [`tidegate_core::remote_eval`] computes every number that a caller sees from
//! these states.
//!
//! - **One Redis key per rule and key.** All limits of a rule for one key (such as a client
//!   address) are stored in one value. Rules keyed by the same values share a hash tag, and
//!   therefore a hash slot.
//! - **Every key of a counter has a time to live**, which is never shorter than the lifetime of its
//!   state. The only exception is a key with a block that has no end.
//! - **One clock.** Each decision reads the server's `TIME` once. Setting the clock back creates no
//!   tokens: a state that was written while the clock was more than 10 s ahead is clamped to at
//!   most the spent units of an exhausted key. After a step back of at most 10 s, denials only last
//!   longer.
//! - **A changed rule keeps its counts.** A value records the parameters of its states. If the
//!   stored parameters differ from the parameters of the charge, the client converts the state in
//!   the same way as the memory store. The script then uses the converted state for its decision,
//!   unless the value has changed in between.
//!
//! # Cost
//!
//! The table shows the CPU time of the Redis server per call, with pipelines of 64 calls and
//! 100,000 random keys. The figures are medians of one run on two shared cores (Redis 7.0.15 /
//! Valkey 9.1.2). The baseline is the fastest exact GCRA script on its own, which calls `TIME`,
//! `GET` and `PSETEX` and does nothing else.
//!
//! | decision | µs |
//! | --- | --- |
//! | baseline: a minimal exact GCRA script | 4.9 / 4.8 |
//! | one GCRA limit (`gcra`, `token_bucket`, `leaky_bucket`) | 4.7 / 4.8 |
//! | four GCRA limits on one key | 6.8 / 6.9 |
//! | one fixed window; weighted; 10 buckets | 10.2 / 12.3; 10.0 / 10.4; 11.0 / 14.3 |
//! | one log of 60; four windows over one log of up to 800 | 12.2 / 19.9; 21.5 / 22.7 |
//!
//! According to `MEMORY USAGE`, a GCRA limit with a 16-byte key takes 88 bytes. Together with its
//! entries in the server's key table and expiry table, the key takes 145 bytes of memory;
//! `docs/fleet.md` has the breakdown. 100,000 sliding window logs of 60 requests each take 77 MB.
//!
//! A sliding window log takes 10 bytes per request. If all limits of a rule are logs that do not
//! count denied requests, a decision reads and writes only a few positions of the log, whatever its
//! length. Every peek reads the whole log. Every decision also reads the whole log if the log
//! counts denied requests or is combined with other algorithms. `docs/fleet.md` has the cost of
//! reading a whole log.

mod blocks;
mod call;
mod cas;
mod client;
mod conversion;
mod decode;
mod denial_hint;
mod denials;
mod encode;
mod error;
mod exec;
mod expiry_queue;
mod fallback;
mod keys;
mod layout;
mod lead;
mod overrides;
mod renew;
mod scripts;
mod server_id;
mod store;
mod top;
mod value_format;

pub use self::{
    client::{
        Address, ConnectError, Health, Login, Redis, RedisSettings, RedisTls, Topology, Transport,
    },
    denials::{MAX_PUBLISHED_DENIALS, PublishedDenials},
    error::StoreError,
    expiry_queue::{ClaimedReservation, ExpiryQueueEntry},
    fallback::{
        FallbackReceipt, FallbackSettings, FallbackStats, FallbackStore, NodeShare, OutageChange,
    },
    keys::{ScanPosition, ScannedKeys},
    overrides::{OverrideChanges, OverridePutResult, OverrideVersion},
    server_id::random_server_id,
    store::{
        GUARD_KEPT, RedisReceipt, RedisReservation, RedisStore, ReservationEnd, ReservationStatus,
    },
    top::PublishedSlice,
};
