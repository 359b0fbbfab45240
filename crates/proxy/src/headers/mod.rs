//! Request and response headers: lookup, hop-by-hop headers, the request target, and the forwarding
//! headers.

pub(crate) mod forwarded;
pub(crate) mod hop_by_hop;
pub(crate) mod lookup;
pub(crate) mod target;
