//! Envoy's rate limit service: what envoyproxy/ratelimit answers, decided by the one limiter.
//!
//! ```text
//! door     parse     bytes                -> RateLimitRequest      the gRPC door, or POST /json
//! rules    find      domain, entries      -> Rule                  the files of envoyproxy/ratelimit, as a tree
//! key      write     domain, entries      -> key                   whose count it is
//! decide             [Applied]            -> [Judged]              each charged on its own, or all together
//! answer             [Judged]             -> RateLimitAnswer       statuses, headers, metadata
//! door     render    RateLimitAnswer      -> bytes
//! ```
//!
//! The service differs from the other doors in two promises: each descriptor is charged on its own, and what is denied is
//! counted too. Both are modes of the decision that everybody else gets.

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
