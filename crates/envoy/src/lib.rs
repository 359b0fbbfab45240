//! Envoy's rate limit service: the API of envoyproxy/ratelimit on top of Tidegate's limiter, its
//! quota service, and the gRPC listener.
//!
//! ```text
//! listener  parse   bytes                -> RateLimitRequest  the gRPC listener, or POST /json
//! rules     find    domain, entries      -> DescriptorRule    a tree, from files or by xDS
//! key       write   domain, entries      -> key               identifies the counter
//! evaluate          [AppliedLimit]       -> [LimitResult]     charged one by one, or all or none
//! response          [LimitResult]        -> RateLimitAnswer   statuses, headers, metadata
//! listener  render  RateLimitAnswer      -> bytes
//! ```
//!
//! The module `kuadrant` adds checks, reports and reservations on the same counters. The module
//! `limitador` finds the limits of a Limitador limits file that apply to a request, and implements
//! Limitador's HTTP API.
//!
//! Operators can set overrides for the rules of descriptors while the server runs.
//!
//! The rate limit service differs from Tidegate's other listeners in two ways: by default, it
//! charges each descriptor separately, and it also counts denied hits. All listeners use the same
//! decision function.

mod all_or_nothing;
mod answer;
mod applied_limit;
mod config;
mod config_watcher;
mod counters;
mod environment;
mod evaluate;
pub mod grpc;
pub mod json;
mod key;
mod kuadrant;
mod limitador;
mod metadata;
mod metrics;
mod over_limit_cache;
mod overrides;
mod prometheus;
mod proto;
pub mod quota;
mod ratelimit_metrics;
mod redis_variables;
mod request;
mod response;
mod rule_source;
mod rules;
mod service;
mod stat_names;
mod unit;
mod variables;
pub mod xds;

pub use self::{
    answer::{Code, CurrentLimit, DescriptorStatus, RateLimitAnswer, ResponseHeader, RlsError},
    config::{File, FileMistake, LoadedConfig, read, read_limitador},
    config_watcher::{CONFIG_LOG_TARGET, ConfigFilesError, ConfigWatcher, MAX_FILES, load_files},
    counters::{ConfigLoads, HitCounterKind, MAX_PATHS},
    environment::{ADMIN_TOKEN, FromEnvironment, from_environment},
    kuadrant::{CommitRequest, ReserveRequest, ReserveResult},
    metadata::Metadata,
    request::{
        Descriptor, LimitOverride, MAX_DESCRIPTOR_BYTES, MAX_DESCRIPTOR_ENTRIES, MAX_DESCRIPTORS,
        MAX_DOMAIN_BYTES, RateLimitRequest,
    },
    rule_source::RuleSource,
    service::RateLimitService,
    unit::Unit,
    variables::{Variables, settings_from_variables},
    xds::{InitialConfig, XdsClient},
};
