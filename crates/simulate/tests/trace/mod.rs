//! Request traces, and their simulation.

use std::{fmt::Write as _, fs, sync::Arc};

use tidegate_simulate::{
    EntryMapping, LogFormat, LogSource, Logs, Simulation, SimulationHandle, SimulationReport,
};

/// A request: the delay after the previous request, the client ID, and the cost.
pub(crate) type Step = (u64, u8, u64);

/// Returns the log of a trace, as JSON lines.
pub(crate) fn log(steps: &[Step]) -> String {
    let mut now = 1_795_325_114_000_000_u64;
    let mut log = String::new();
    for (delay, client, units) in steps {
        now += delay;
        writeln!(
            log,
            r#"{{"time":{now},"client":"203.0.113.{client}","path":"/{}","units":{units}}}"#,
            client % 3
        )
        .unwrap();
    }
    log
}

/// Simulates a log. The entry `units` is the cost of a request.
pub(crate) fn simulate(simulation: Simulation<'_>, log: &str) -> SimulationReport {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.json");
    fs::write(&path, log).unwrap();
    let logs = Logs {
        sources: vec![LogSource::File(path)],
        format: LogFormat::Detect,
        mappings: vec![EntryMapping::parse("units=units").unwrap()],
    };
    let handle = Arc::new(SimulationHandle::default());
    simulation.run(&logs, &handle).unwrap()
}
