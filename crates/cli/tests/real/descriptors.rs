//! A server with few file descriptors, and idle clients that use all of them.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    time::Duration,
};

use crate::support::{Ask, EVERY_DOOR, Process, Scratch};

/// Sends `asked` and returns the response, or its first part.
fn answer(address: SocketAddr, asked: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(asked).unwrap();
    let mut read = vec![0; 1_024];
    let count = stream.read(&mut read).unwrap();
    read.truncate(count);
    read
}

#[test]
fn silent_clients_do_not_block_other_clients_or_the_admin_listener() {
    let scratch = Scratch::new();
    scratch.write("rules.yaml", &format!("{EVERY_DOOR}rules: []\n"));
    let program = env!("CARGO_BIN_EXE_tidegate");
    let mut command = Command::new("sh");
    let script = "ulimit -n 400 && exec \"$0\" serve --config rules.yaml";
    command
        .args(["-c", script, program])
        .env("NO_COLOR", "1")
        .current_dir(scratch.path());
    let mut server = Process::start(&mut command);
    let warning = server.wait_for(&["open files", "lowered"]);
    assert!(warning.contains("allows 400"), "{warning}");
    let [http, grpc, resp, admin] = ["http", "grpc", "resp", "admin"].map(|listener| {
        let line = server.wait_for(&["listening", &format!("listener=\"{listener}\"")]);
        let line = line.replace('"', "");
        let address = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("address="));
        address.unwrap().parse::<SocketAddr>().unwrap()
    });
    // More connections to each listener than the server may open files.
    let silent: Vec<TcpStream> = [http, resp, grpc]
        .iter()
        .flat_map(|listener| (0..120).map(move |_| TcpStream::connect(listener).unwrap()))
        .collect();
    assert_eq!(Ask::get(admin, "/healthz").send().status, 200);
    assert_eq!(answer(resp, b"PING\r\n"), b"+PONG\r\n");
    let asked = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n";
    assert!(answer(http, asked).starts_with(b"HTTP/1.1 404"));
    let metrics = Ask::get(admin, "/metrics").send().body;
    let evicted = r#"tidegate_connections_evicted_total{door="http"} "#;
    let line = metrics.lines().find_map(|line| line.strip_prefix(evicted));
    assert!(line.unwrap().parse::<u64>().unwrap() > 50, "{metrics}");
    drop(silent);
}
