//! Rate limits and concurrency limits as tower layers, for axum, tonic, hyper and any other HTTP
//! service.
//!
//! - [`RateLimitLayer`] admits only requests that the rules allow. The layer itself responds to all
//!   other requests, with 429 or 503 and problem details (RFC 9457), or with a gRPC status.
//! - [`ConcurrencyLimitLayer`] admits only as many concurrent requests as the service can handle.
//!   [`ConcurrencyLimitLayer`] does not need rules, because it derives the limit from the latency.
//! - [`HeaderWriter`] writes the decision about a request as `RateLimit` and `Retry-After` headers.
//!   Use [`HeaderWriter`] in programs that decide without a layer.
//!
//! A limiter of the crate `tidegate` contains the rules, the store and the clock. The types of
//! [`identity`] configure how the client of a request is identified, and which proxies are trusted.
//!
//! # Examples
//!
//! ```
//! use std::{convert::Infallible, sync::Arc};
//!
//! use bytes::Bytes;
//! use http::{Request, Response, StatusCode};
//! use http_body_util::Full;
//! use tidegate::{Clock, Limiter};
//! use tidegate_core::{AlgorithmName, Limit, MemoryBounds, MemoryStore, Rule, RuleSet};
//! use tidegate_tower::RateLimitLayer;
//! use tower::{Layer, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! // One request per minute and path.
//! let limit = Limit::shorthand(AlgorithmName::TokenBucket, "1/min").unwrap();
//! let rule = Rule::new("per-path", vec![limit]).unwrap().keyed_by(&["path"]).unwrap();
//! let rules = RuleSet::build(vec![rule], Vec::new()).unwrap();
//! let store = MemoryStore::new(MemoryBounds::default());
//! let limiter = Arc::new(Limiter::new(rules, store, Clock::real()));
//!
//! let hello = service_fn(|_: Request<()>| async {
//!     Ok::<_, Infallible>(Response::new(Full::from(Bytes::from("hello"))))
//! });
//! let limited = RateLimitLayer::new(limiter).layer(hello);
//!
//! let request = || Request::builder().uri("/greeting").body(()).unwrap();
//! let first = limited.clone().oneshot(request()).await.unwrap();
//! assert_eq!(first.status(), StatusCode::OK);
//! let second = limited.oneshot(request()).await.unwrap();
//! assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(second.headers()["retry-after"], "60");
//! # }
//! ```

mod concurrency_limit;
mod denial;
pub mod headers;
mod rate_limit;
mod structured_fields;
mod usage;

pub use concurrency_limit::{
    ConcurrencyLimit, ConcurrencyLimitFuture, ConcurrencyLimitLayer, ConcurrencyLimiter,
    ConcurrencyPermit, HeadroomCondition, Load, SlotShare,
};
pub use denial::{
    ErrorFormat, denial_response, grpc_content_type, malformed_response, overload_response,
};
pub use headers::{HeaderWriter, Legacy, RuleNames};
pub use rate_limit::{
    BodyCosts, DenialInfo, LimitedBody, LongLivedPermit, RateLimit, RateLimitLayer,
    RateLimitStatus, ResponseEntries, ResponseFuture, RuleBodyCost,
};
pub use tidegate_identity as identity;
pub use usage::UsageScanner;
