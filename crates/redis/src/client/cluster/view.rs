//! One node's view of the cluster: the owner of each slot, and the owner's configuration epoch.
//!
//! `CLUSTER SLOTS` returns the endpoints for clients, `CLUSTER NODES` returns the configuration
//! epochs, and `CLUSTER INFO` returns whether the node serves any keys. A node partitioned from the
//! majority reports `cluster_state:fail`, and rejects commands for any key with CLUSTERDOWN.

use std::{collections::HashMap, time::Duration};

use redis::{Pipeline, Value, aio::MultiplexedConnection};

use super::super::{
    error::ConnectError,
    handshake::{self, ServerKind, as_text},
    hash_slot::HASH_SLOTS,
    settings::{Address, RedisSettings},
};

/// Timeout for reading one node's view, including the time to connect. The timeout is independent
/// of the decision timeout, because no decision waits for a view.
pub(super) const VIEW_TIMEOUT: Duration = Duration::from_secs(1);

/// One node's view of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClusterView {
    /// The id of the node that returned this view.
    pub(super) reporter: String,
    pub(super) state: ReportedState,
    pub(super) claims: Vec<Claim>,
}

/// The cluster state that a node reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReportedState {
    Ok,
    /// The node rejects commands for any key with CLUSTERDOWN.
    Failed,
}

/// A range of slots, and the node that claims them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) first: u16,
    pub(super) last: u16,
    /// The id of the primary.
    pub(super) owner: String,
    /// The configuration epoch of the primary. The cluster resolves conflicts in favour of the
    /// highest epoch.
    pub(super) epoch: u64,
    /// The primary, then its replicas.
    pub(super) servers: Vec<Address>,
}

/// Reads the view of `node` over the open connection `open`, or over a new connection if `open` is
/// `None`.
pub(super) async fn read(
    settings: &RedisSettings,
    node: &Address,
    open: Option<MultiplexedConnection>,
) -> Result<ClusterView, ConnectError> {
    let query = async {
        let mut connection = match open {
            Some(connection) => connection,
            None => handshake::connect(settings, node, ServerKind::ClusterNode, || {}).await?,
        };
        connection.set_response_timeout(VIEW_TIMEOUT);
        // Send the three commands as one pipeline, so that the node executes them without
        // processing cluster messages in between.
        let mut pipeline = Pipeline::with_capacity(3);
        pipeline.cmd("CLUSTER").arg("SLOTS");
        pipeline.cmd("CLUSTER").arg("NODES");
        pipeline.cmd("CLUSTER").arg("INFO");
        let replies = connection.send_packed_commands(&pipeline, 0, 3).await;
        replies.map_err(|error| ConnectError::from_library(node, &error))
    };
    let replies = tokio::time::timeout(VIEW_TIMEOUT, query).await;
    let replies = replies.unwrap_or_else(|_| {
        Err(ConnectError::Slow {
            address: node.clone(),
            problem: "no reply to the CLUSTER commands".to_owned(),
        })
    })?;
    parse_view(node, replies)
}

fn parse_view(node: &Address, replies: Vec<Value>) -> Result<ClusterView, ConnectError> {
    let nonsense = |problem: String| ConnectError::UnexpectedReply {
        address: node.clone(),
        problem,
    };
    let [slots, nodes, info] = <[Value; 3]>::try_from(replies)
        .map_err(|_| nonsense("expected three replies to three commands".to_owned()))?;
    for reply in [&slots, &nodes, &info] {
        if let Value::ServerError(error) = reply {
            return Err(ConnectError::from_library(node, &error.clone().into()));
        }
    }
    let nodes = as_text(&nodes).and_then(|text| NodeTable::parse(&text));
    let nodes =
        nodes.ok_or_else(|| nonsense("the reply to CLUSTER NODES is invalid".to_owned()))?;
    let info = as_text(&info)
        .ok_or_else(|| nonsense("the reply to CLUSTER INFO is invalid".to_owned()))?;
    let claims = parse_claims(&slots, &nodes, node)
        .ok_or_else(|| nonsense("the reply to CLUSTER SLOTS is invalid".to_owned()))?;
    if claims.is_empty() {
        let problem = "no node of the cluster has hash slots; create the cluster first";
        return Err(nonsense(problem.to_owned()));
    }
    let state = if info.lines().any(|line| line.trim() == "cluster_state:ok") {
        ReportedState::Ok
    } else {
        ReportedState::Failed
    };
    Ok(ClusterView {
        reporter: nodes.myself,
        state,
        claims,
    })
}

/// The information from `CLUSTER NODES` that `CLUSTER SLOTS` does not return.
#[derive(Debug, PartialEq, Eq)]
struct NodeTable {
    myself: String,
    epochs: HashMap<String, u64>,
}

impl NodeTable {
    /// Parses one node per line: `ID HOST:PORT@BUS FLAGS PRIMARY PING PONG EPOCH LINK
    /// [SLOTS]…`.
    fn parse(text: &str) -> Option<Self> {
        let (mut myself, mut epochs) = (None, HashMap::new());
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let mut fields = line.split_ascii_whitespace();
            let (id, flags) = (fields.next()?, fields.nth(1)?);
            let epoch = fields.nth(3)?.parse().ok()?;
            if flags.split(',').any(|flag| flag == "myself") {
                myself = Some(id.to_owned());
            }
            epochs.insert(id.to_owned(), epoch);
        }
        Some(Self {
            myself: myself?,
            epochs,
        })
    }
}

/// Parses the reply to `CLUSTER SLOTS`; `None` if it is malformed.
fn parse_claims(slots: &Value, nodes: &NodeTable, node: &Address) -> Option<Vec<Claim>> {
    let Value::Array(entries) = slots else {
        return None;
    };
    if entries.len() > usize::from(HASH_SLOTS) {
        return None;
    }
    entries
        .iter()
        .map(|entry| parse_claim(entry, nodes, node))
        .collect()
}

/// Parses `[first, last, [host, port, id, …], …]`. A missing host stands for the node that sent the
/// reply.
fn parse_claim(entry: &Value, nodes: &NodeTable, node: &Address) -> Option<Claim> {
    let Value::Array(parts) = entry else {
        return None;
    };
    let [Value::Int(first), Value::Int(last), servers @ ..] = parts.as_slice() else {
        return None;
    };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    if first > last || last >= HASH_SLOTS {
        return None;
    }
    let servers = servers
        .iter()
        .map(|server| parse_server(server, node))
        .collect::<Option<Vec<_>>>()?;
    let owner = servers.first()?.1.clone();
    Some(Claim {
        first,
        last,
        // If the owner is missing in `CLUSTER NODES`, the node's view changed between the two
        // commands. The epoch of the owner is then unknown, so the claim of any other node wins.
        epoch: nodes.epochs.get(&owner).copied().unwrap_or(0),
        owner,
        servers: servers.into_iter().map(|(address, _)| address).collect(),
    })
}

/// Parses the address and the id in `[host, port, id, …]`.
fn parse_server(server: &Value, node: &Address) -> Option<(Address, String)> {
    let Value::Array(parts) = server else {
        return None;
    };
    let [host, Value::Int(port), id, ..] = parts.as_slice() else {
        return None;
    };
    let host = as_text(host).filter(|host| !host.is_empty() && host != "?");
    let host = host.as_deref().unwrap_or(&node.host);
    let port = u16::try_from(*port).ok()?;
    Some((node.with_endpoint(host, port), as_text(id)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: &str = "\
        aa 10.0.0.1:7000@17000 myself,master - 0 0 3 connected 0-99\n\
        bb 10.0.0.2:7001@17001,host.internal master - 0 1 9 connected 100-16383 [5->-aa]\n\
        cc 10.0.0.3:7002@17002 slave aa 0 1 3 connected\n";

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn node() -> Address {
        Address::parse("redis://10.0.0.1:7000").unwrap().0
    }

    fn entry(first: i64, last: i64, servers: &[(Value, i64, &str)]) -> Value {
        let mut parts = vec![Value::Int(first), Value::Int(last)];
        parts.extend(
            servers.iter().map(|(host, port, id)| {
                Value::Array(vec![host.clone(), Value::Int(*port), bulk(id)])
            }),
        );
        Value::Array(parts)
    }

    #[test]
    fn endpoints_epochs_and_the_state_are_parsed() {
        let slots = Value::Array(vec![
            entry(
                0,
                99,
                &[(Value::Nil, 7_000, "aa"), (bulk("10.0.0.3"), 7_002, "cc")],
            ),
            entry(100, 16_383, &[(bulk("host.internal"), 7_001, "bb")]),
        ]);
        let here = node();
        let view_in = |state: &str| {
            let replies = vec![slots.clone(), bulk(NODES), bulk(state)];
            parse_view(&here, replies).unwrap()
        };
        let found = view_in("cluster_enabled:1\r\ncluster_state:ok\r\n");
        assert_eq!(
            (found.reporter.as_str(), found.state),
            ("aa", ReportedState::Ok)
        );
        assert_eq!(
            found.claims[0],
            Claim {
                first: 0,
                last: 99,
                owner: "aa".to_owned(),
                epoch: 3,
                servers: vec![here.clone(), here.with_endpoint("10.0.0.3", 7_002)],
            }
        );
        assert_eq!(
            (found.claims[1].owner.as_str(), found.claims[1].epoch),
            ("bb", 9)
        );
        assert_eq!(
            found.claims[1].servers,
            [here.with_endpoint("host.internal", 7_001)]
        );
        assert_eq!(
            view_in("cluster_state:fail\r\n").state,
            ReportedState::Failed
        );
    }

    #[test]
    fn invalid_replies_are_refused() {
        let (here, ok) = (node(), bulk("cluster_state:ok\r\n"));
        let server = [(bulk("h"), 1, "aa")];
        let good = Value::Array(vec![entry(0, 1, &server)]);
        let refused = |slots: Value, nodes: Value| {
            let found = parse_view(&here, vec![slots, nodes, ok.clone()]);
            found.expect_err("it cannot be read").to_string()
        };
        for (first, last) in [(5, 4), (0, 16_384), (-1, 3)] {
            let slots = Value::Array(vec![entry(first, last, &server)]);
            assert!(refused(slots, bulk(NODES)).contains("CLUSTER SLOTS"));
        }
        let far = Value::Array(vec![entry(0, 1, &[(bulk("h"), 70_000, "aa")])]);
        assert!(refused(far, bulk(NODES)).contains("CLUSTER SLOTS"));
        assert!(refused(Value::Array(vec![entry(0, 1, &[])]), bulk(NODES)).contains("SLOTS"));
        assert!(refused(Value::Nil, bulk(NODES)).contains("CLUSTER SLOTS"));
        assert!(refused(Value::Array(vec![]), bulk(NODES)).contains("create the cluster first"));
        for nodes in [
            "",
            "aa",
            "aa h:1@2 master - 0 0 1 connected",
            "aa h myself - 0 0 x y",
        ] {
            assert!(
                refused(good.clone(), bulk(nodes)).contains("CLUSTER NODES"),
                "{nodes}"
            );
        }
        assert!(parse_view(&here, vec![good]).is_err());
    }
}
