//! Four servers on one Redis, hammered on the same keys.

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    servers::RedisServer,
    support::{Ask, EVERY_DOOR, Scratch, Server, repository},
};

const SERVERS: usize = 4;

/// Connections to each server.
const CLIENTS: usize = 2;

/// How long the servers are hammered.
const FOR: Duration = Duration::from_secs(2);

/// Commands of one pipeline.
const BATCH: usize = 16;

/// So many at once, and so many a second: more than a busy machine leaves unused while it looks away.
const BURST: u64 = 300;
const RATE: u64 = 200;

fn fleet(redis: &RedisServer, more: &str, rules: &str) -> Vec<Server> {
    let store = format!("store: {{redis: \"{}\", timeout: 2s{more}}}\n", redis.url());
    let config = format!("{EVERY_DOOR}{store}{rules}");
    let servers: Vec<Server> = (0..SERVERS)
        .map(|_| Server::start_in(Scratch::new(), &config))
        .collect();
    for server in &servers {
        until_exact(server);
    }
    servers
}

/// Waits until Redis decides.
fn until_exact(server: &Server) {
    crate::servers::eventually("the server has found Redis", || {
        Ask::get(server.admin, "/readyz")
            .send()
            .body
            .contains("\"up\":1")
            .then_some(())
    });
}

#[test]
fn four_servers_admit_together_what_one_limit_says() {
    let redis = RedisServer::start();
    let rules = format!(
        "rules: [{{name: shared, key: [user], limits: [{{algorithm: token_bucket, capacity: {BURST}, refill: {RATE}/s}}]}}]"
    );
    let servers = fleet(&redis, ", denials: off", &rules);
    let began = now();
    let clients: Vec<_> = servers
        .iter()
        .flat_map(|server| [server.resp; CLIENTS])
        .enumerate()
        .map(|(number, door)| thread::spawn(move || hammer(door, number, began)))
        .collect();
    let admitted: Vec<u64> = clients
        .into_iter()
        .map(|client| client.join().unwrap())
        .collect();
    let (admitted, took) = (admitted.iter().sum::<u64>(), began.elapsed());
    // In any interval: what is there at its beginning, and what comes back.
    let most = BURST + RATE * u64::try_from(took.as_millis()).unwrap() / 1_000;
    assert!(
        admitted <= most,
        "{admitted} admitted of {most} in {took:?}"
    );
    let least = BURST + RATE * u64::try_from(FOR.as_millis()).unwrap() / 1_000;
    assert!(
        admitted * 100 >= least * 99,
        "{admitted} admitted of at least {least} in {took:?}"
    );
    for server in servers {
        let metrics = server.metrics();
        assert!(
            metrics.contains("tidegate_decisions_total{source=\"local\"} 0\n"),
            "{metrics}"
        );
        server.stop();
    }
}

/// Sends pipelines for as long as it lasts, and answers how many checks passed.
fn hammer(door: SocketAddr, number: usize, began: Instant) -> u64 {
    let stream = TcpStream::connect(door).unwrap();
    stream.set_nodelay(true).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
    let batch = "TIDEGATE.CHECK user everybody\r\n".repeat(BATCH);
    let mut admitted = 0;
    while began.elapsed() < FOR {
        (&stream).write_all(batch.as_bytes()).unwrap();
        for _ in 0..BATCH {
            assert_eq!(answers.next().unwrap().unwrap(), "*6", "client {number}");
            admitted += u64::from(answers.next().unwrap().unwrap() == ":1");
            // The name of the rule takes a line more, for its length.
            for _ in 0..6 {
                answers.next().unwrap().unwrap();
            }
        }
    }
    admitted
}

#[test]
fn an_operator_blocks_on_one_server_and_all_deny() {
    let redis = RedisServer::start();
    let servers = fleet(
        &redis,
        "",
        "rules: [{name: shared, key: [user], limits: [10/h]}]",
    );
    let check = |server: &Server| server.check(&json!({"user": "mallory"})).json();
    assert!(
        servers
            .iter()
            .all(|server| check(server)["allowed"] == true)
    );
    assert!(
        servers[0]
            .operate(&["block", "shared", "mallory", "--for", "10min"])
            .status
            .success()
    );
    for server in &servers {
        let verdict = check(server);
        assert_eq!(
            (&verdict["allowed"], &verdict["reason"]),
            (&false.into(), &"blocked".into())
        );
        let blocks = server.operate(&["blocks"]);
        assert!(String::from_utf8_lossy(&blocks.stdout).contains("mallory"));
    }
    assert!(
        servers[1]
            .operate(&["unblock", "shared", "mallory"])
            .status
            .success()
    );
    assert!(
        servers
            .iter()
            .all(|server| check(server)["allowed"] == true)
    );
    assert!(
        servers[2]
            .operate(&["reset", "shared", "mallory"])
            .status
            .success()
    );
    assert_eq!(check(&servers[3])["remaining"], 9);
}

#[test]
fn a_server_starts_without_redis_and_says_so() {
    let port = crate::servers::free_port();
    let config = format!(
        "{EVERY_DOOR}store: {{redis: \"redis://127.0.0.1:{port}\"}}\nrules: [{{name: r, key: [user], limits: [10/h], on_failure: open}}]"
    );
    let server = Server::start_in(Scratch::new(), &config);
    let ready = crate::servers::eventually("the server says what is wrong", || {
        let ready = Ask::get(server.admin, "/readyz").send();
        assert_eq!(ready.status, 200);
        ready.json()["redis"]["problem"].as_str().map(str::to_owned)
    });
    assert!(
        ready.contains(&format!("cannot reach Redis at 127.0.0.1:{port}")),
        "{ready}"
    );
    let verdict = server.check(&json!({"user": "u"})).json();
    assert_eq!(
        (
            &verdict["allowed"],
            &verdict["source"],
            &verdict["exactness"]
        ),
        (&true.into(), &"policy".into(), &"none".into())
    );
    let _redis = RedisServer::start_on(port, &[]);
    until_exact(&server);
    let verdict = server.check(&json!({"user": "u"})).json();
    assert_eq!(
        (&verdict["source"], &verdict["remaining"]),
        (&"redis".into(), &9.into())
    );
    server.stop();
}

#[test]
fn every_metric_of_a_fleet_is_listed() {
    let page = std::fs::read_to_string(repository().join("docs/fleet.md")).unwrap();
    let redis = RedisServer::start();
    let metrics = fleet(&redis, "", "").remove(0).metrics();
    let there = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let of_the_fleet = there
        .filter(|name| name.starts_with("tidegate_redis") || *name == "tidegate_decisions_total");
    let missing: Vec<&str> = of_the_fleet
        .filter(|name| !page.contains(&format!("| `{name}`")))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "measured from outside")]
    Instant::now()
}
