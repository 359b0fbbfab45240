//! Raises the file descriptor limit of the process, and lowers the connection limits if this limit
//! is still too low.
//!
//! Each connection uses a descriptor. With a limit of 1,024 descriptors and 10,000 connections per
//! listener, the idle clients of one listener could exhaust all descriptors. The other listeners,
//! including the admin listener, and upstream connections would then have no descriptors left.
//! Therefore, the server raises this limit at startup as far as the system allows. If the system
//! allows too few descriptors, the server lowers the connection limits.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_config::{Config, ListenerSettings};

/// The number of descriptors reserved for listening sockets, epoll, files, pipes and DNS lookups.
const RESERVED_DESCRIPTORS: u64 = 96;

/// The limit that is assumed if the system has no limit.
const UNLIMITED: u64 = 1 << 20;

/// A connection limit is never lowered below `MIN_CONNECTIONS`.
const MIN_CONNECTIONS: u64 = 16;

/// Raises the file descriptor limit. If the limit is still too low, lowers the connection limits to
/// fit, and returns a warning with the lowered limits.
pub(super) fn fit_connections(config: &mut Config) -> Option<String> {
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let limit = raise_limit();
    let upstreams = config
        .proxy
        .iter()
        .flat_map(|proxy| &proxy.upstreams)
        .map(|upstream| upstream.urls.len().saturating_mul(upstream.max_connections));
    let reserved = upstreams.map(count).fold(
        count(config.listeners.admin.max_connections)
            .saturating_add(count(config.listeners.metrics.max_connections)),
        u64::saturating_add,
    );
    let ListenerSettings {
        http,
        grpc,
        resp,
        spop,
        ..
    } = &mut config.listeners;
    let proxy = config.proxy.as_mut();
    let bounds = [
        (
            "http",
            config.listen.http.map(|_| &mut http.max_connections),
        ),
        (
            "grpc",
            config.listen.grpc.map(|_| &mut grpc.max_connections),
        ),
        (
            "resp",
            config.listen.resp.map(|_| &mut resp.max_connections),
        ),
        (
            "spop",
            config.listen.spop.map(|_| &mut spop.max_connections),
        ),
        (
            "proxy",
            proxy.map(|proxy| proxy.fitted_connections.insert(proxy.max_connections)),
        ),
    ];
    let bound = |(listener, connections): (&'static str, Option<_>)| {
        connections.map(|connections| Bound {
            listener,
            connections,
        })
    };
    let mut bounds: Vec<Bound<'_>> = bounds.into_iter().filter_map(bound).collect();
    fit(&mut bounds, reserved, limit)
}

/// Raises the soft open-file limit to the hard limit, and returns the resulting limit.
fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(UNLIMITED);
    let soft = limit.current.unwrap_or(UNLIMITED);
    if soft >= hard {
        return soft;
    }
    let raised = Rlimit {
        current: Some(hard),
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!(%error, soft, hard, "cannot raise the open-file limit");
            soft
        }
    }
}

/// A connection limit that can be lowered, with the name of its listener.
#[derive(Debug)]
struct Bound<'a> {
    listener: &'static str,
    connections: &'a mut usize,
}

/// Lowers the connection limits in `bounds` proportionally until their sum is at most `limit` minus
/// `reserved` descriptors. Returns a warning if a connection limit was lowered.
fn fit(bounds: &mut [Bound<'_>], reserved: u64, limit: u64) -> Option<String> {
    let count = |bound: &Bound<'_>| u64::try_from(*bound.connections).unwrap_or(u64::MAX);
    let wanted = bounds.iter().map(count).fold(0, u64::saturating_add);
    let reserved = reserved.saturating_add(RESERVED_DESCRIPTORS);
    if wanted.saturating_add(reserved) <= limit {
        return None;
    }
    // Client connections get at least a third of all descriptors, because upstream pools rarely use
    // all of their reserved connections.
    let room = limit.saturating_sub(reserved).max(limit / 3);
    let mut lowered = Vec::new();
    for bound in bounds {
        // Each listener's share is proportional to its configured limit. The product may overflow
        // `u64`, so compute it in `u128`.
        let share = u128::from(count(bound)) * u128::from(room) / u128::from(wanted.max(1));
        let share = u64::try_from(share)
            .unwrap_or(u64::MAX)
            .max(MIN_CONNECTIONS);
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        *bound.connections = share.min(*bound.connections);
        lowered.push(format!("{} {}", bound.listener, bound.connections));
    }
    let needed = wanted.saturating_add(reserved);
    Some(format!(
        "the connection limits need {needed} open files, and the system allows {limit}; lowered `max_connections` to {}; \
         raise the hard limit (`LimitNOFILE=` in systemd, `ulimit -Hn`), or lower the connection limits",
        lowered.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(mut bounds: [usize; 2], reserved: u64, limit: u64) -> ([usize; 2], Option<String>) {
        let [http, resp] = &mut bounds;
        let mut listeners = [("http", http), ("resp", resp)].map(|(listener, connections)| Bound {
            listener,
            connections,
        });
        let warning = fit(&mut listeners, reserved, limit);
        (bounds, warning)
    }

    #[test]
    fn limits_that_fit_are_unchanged() {
        let (bounds, warning) = fitted([10_000, 500], 128, 10_724);
        assert_eq!((bounds, warning), ([10_000, 500], None));
    }

    #[test]
    fn limits_are_lowered_in_proportion_and_never_to_zero() {
        let (bounds, warning) = fitted([10_000, 5_000], 128, 1_024);
        assert_eq!(bounds, [533, 266]);
        let warning = warning.unwrap();
        assert!(warning.contains("need 15224 open files"), "{warning}");
        assert!(warning.contains("allows 1024"), "{warning}");
        assert!(warning.contains("http 533, resp 266"), "{warning}");
        assert_eq!(fitted([10_000, 10], 128, 1_024).0, [799, 10]);
        let with_large_pools = fitted([10_000, 10_000], 1_000_000, 1_024).0;
        assert_eq!(with_large_pools, [170, 170]);
        assert_eq!(fitted([10_000, 10_000], 1_000, 10).0, [16, 16]);
    }
}
