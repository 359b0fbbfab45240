//! The result tables, in Markdown.

/// The column of the limiter with which the other limiters are compared.
const PEER: usize = 0;
/// The column of Tidegate's store.
const OURS: usize = 1;
/// The column of the library, which uses this store.
const LIBRARY: usize = 2;
/// The library's target, as a share of the store's time.
const LIBRARY_TARGET: f64 = 1.05;

/// The measurements for one combination of the number of keys and the number of threads.
pub struct Cell {
    pub keys: usize,
    pub threads: usize,
    /// The nanoseconds per decision, by limiter and round.
    pub nanos: Vec<Vec<f64>>,
}

impl Cell {
    pub fn new(keys: usize, threads: usize, limiters: usize) -> Self {
        Self {
            keys,
            threads,
            nanos: vec![Vec::new(); limiters],
        }
    }

    /// Returns the median of the per-round ratios of two limiters' times. Disturbances that affect
    /// both limiters cancel out.
    fn ratio(&self, limiter: usize, peer: usize) -> f64 {
        let ratios = self.nanos[limiter]
            .iter()
            .zip(&self.nanos[peer])
            .map(|(ours, peer)| ours / peer);
        median(&ratios.collect::<Vec<_>>())
    }

    /// Returns Tidegate's target, as a share of governor's time.
    fn target(&self) -> f64 {
        if self.keys >= 1_000_000 { 0.5 } else { 0.7 }
    }
}

/// Prints one row for each limiter and cell.
pub fn print_speed(names: &[&str], cells: &[Cell]) {
    let peer = names[PEER];
    println!(
        "| keys | threads | limiter | ns per decision and thread, median | minimum to maximum | \
         ratio to {peer} |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for cell in cells {
        for (limiter, name) in names.iter().enumerate() {
            let nanos = &cell.nanos[limiter];
            println!(
                "| {} | {} | {name} | {:.0} | {:.0} to {:.0} | {:.2} |",
                cell.keys,
                cell.threads,
                median(nanos),
                nanos.iter().copied().fold(f64::INFINITY, f64::min),
                nanos.iter().copied().fold(0.0, f64::max),
                cell.ratio(limiter, PEER),
            );
        }
    }
    println!();
    for cell in cells {
        let (ratio, target) = (cell.ratio(OURS, PEER), cell.target());
        println!(
            "- {} keys, {} threads: {ratio:.2} times {peer}, target {target}: {}",
            cell.keys,
            cell.threads,
            verdict(ratio, target)
        );
    }
    for cell in cells {
        let (ratio, ours) = (cell.ratio(LIBRARY, OURS), names[OURS]);
        println!(
            "- {} keys, {} threads: {} {ratio:.3} times {ours}'s store, \
             target {LIBRARY_TARGET}: {}",
            cell.keys,
            cell.threads,
            names[LIBRARY],
            verdict(ratio, LIBRARY_TARGET)
        );
    }
}

/// Returns a word that says whether a measurement meets its target.
pub fn verdict(measured: f64, most: f64) -> &'static str {
    if measured <= most {
        "reached"
    } else {
        "MISSED"
    }
}

/// Returns the middle value, or the mean of the two middle values.
///
/// # Panics
///
/// Panics if `values` is empty.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}
