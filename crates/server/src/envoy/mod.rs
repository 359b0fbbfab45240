//! Envoy's rate limit service: the API of envoyproxy/ratelimit on top of Tidegate's limiter.
//!
//! ```text
//! listener  parse   bytes                -> RateLimitRequest  the gRPC listener, or POST /json
//! rules     find    domain, entries      -> Rule              envoyproxy/ratelimit's files, a tree
//! key       write   domain, entries      -> key               identifies the counter
//! decide            [Applied]            -> [Judged]          charged one by one, or all or none
//! answer            [Judged]             -> RateLimitAnswer   statuses, headers, metadata
//! listener  render  RateLimitAnswer      -> bytes
//! ```
//!
//! The service differs from the other listeners in two ways: each descriptor is charged on its own,
//! and denied hits are counted too. Both are modes of the same decision that the other listeners
//! use.

mod answer;
mod config;
mod counters;
mod decide;
mod environment;
mod exposition;
mod folder;
mod key;
mod metadata;
mod over_cache;
mod overrides;
mod path;
mod redis_variables;
mod request;
mod rules;
mod service;
mod settings;
mod summary;
mod tally;
mod together;
mod unit;
mod variables;

pub use self::{
    answer::{
        Code, CurrentLimit, DescriptorStatus, RateLimitAnswer, RateLimitError, ResponseHeader,
    },
    config::{DomainFiles, File, FileMistake, Loaded, read},
    counters::{Counter, MAX_PATHS},
    environment::{ADMIN_TOKEN, FromEnvironment, from_environment},
    folder::{Folder, FolderError, MAX_FILES, Watch},
    metadata::Metadata,
    request::{
        Descriptor, LimitOverride, MAX_DESCRIPTOR_BYTES, MAX_DESCRIPTORS, MAX_DOMAIN_BYTES,
        MAX_ENTRIES, RateLimitRequest,
    },
    service::RateLimitService,
    settings::{HeaderNames, Ratio, Settings, StoreFailure},
    unit::Unit,
    variables::Variables,
};
