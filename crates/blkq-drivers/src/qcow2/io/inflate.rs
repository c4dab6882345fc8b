//! Decompresses compressed clusters, on a thread besides the queue's: a cluster of 2 MiB takes milliseconds,
//! which would block the other requests of the queue.

use std::ops::Range;
use std::panic::catch_unwind;
use std::sync::Arc;

use blkq::sync::mpsc::{Receiver, Sender, channel};
use blkq::{IoBuffer, Status, Wake};
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use ruzstd::decoding::StreamingDecoder;
use ruzstd::io::Read;

use crate::qcow2::tables::state::State;

/// Largest window of a zstd frame in bytes, which the decoder keeps in memory. RFC 8878 recommends that
/// decoders support at least this size; QEMU's frames have a window of one cluster.
const WINDOW_MAX_BYTES: u64 = 8 << 20;
const STACK_BYTES: usize = 256 << 10;

/// Where the compressed data of a cluster begins: the layer, and the byte of its file.
pub type Place = (u8, u64);

pub struct Compressed {
    /// The bytes of the file to read, aligned for direct I/O.
    pub file: Range<u64>,
    /// The compressed data in these bytes. The L2 entry counts whole sectors, so bytes of other data may follow.
    data: Range<usize>,
    zstd: bool,
    cluster_bytes: usize,
}

impl Compressed {
    /// The cluster of which at most `bytes` bytes of compressed data are at `host` of the file of `layer`. Fails with
    /// [`Status::Io`] if the image is raw.
    pub fn find(state: &State, layer: u8, host: u64, bytes: u64) -> Result<Compressed, Status> {
        let layer = usize::from(layer);
        let (header, align) = (&state.tables(layer).ok_or(Status::Io)?.header, state.layers[layer].align);
        let file = host - host % align..(host + bytes).next_multiple_of(align);
        let first = (host - file.start) as usize;
        let (zstd, cluster_bytes) = (header.zstd, header.cluster_bytes() as usize);
        Ok(Compressed { file, data: first..first + bytes as usize, zstd, cluster_bytes })
    }

    /// The content of the cluster; `read` has the bytes of the file. Fails with [`Status::Io`] if they are not the
    /// compressed data of a cluster.
    pub fn inflate(&self, read: &[u8]) -> Result<Vec<u8>, Status> {
        let (bytes, length) = (&read[self.data.clone()], self.cluster_bytes);
        let inflate = if self.zstd { inflate_zstd } else { inflate_deflate };
        // A decoder asserts properties of its input. A crafted image can break them, so a panic must not end the
        // process.
        catch_unwind(|| inflate(bytes, length)).unwrap_or(Err(Status::Io))
    }
}

/// The result must have `length` bytes.
fn inflate_deflate(compressed: &[u8], length: usize) -> Result<Vec<u8>, Status> {
    let mut content = vec![0; length];
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, done) = decompress(&mut DecompressorOxide::new(), compressed, &mut content, 0, flags);
    match status {
        TINFLStatus::Done | TINFLStatus::HasMoreOutput if done == length => Ok(content),
        _ => Err(Status::Io),
    }
}

fn inflate_zstd(compressed: &[u8], length: usize) -> Result<Vec<u8>, Status> {
    // Decodes one block (at most 128 KiB) at a time, because a frame may have any number of blocks and would else grow
    // without a limit in memory.
    let decoder = StreamingDecoder::new_with_max_window_size(compressed, WINDOW_MAX_BYTES);
    let (mut decoder, mut content) = (decoder.map_err(|_| Status::Io)?, vec![0; length]);
    decoder.read_exact(&mut content).map_err(|_| Status::Io)?;
    if decoder.into_frame_decoder().can_collect() == 0 { Ok(content) } else { Err(Status::Io) }
}

/// A cluster to decompress, and the bytes of its file.
pub type Job = (Place, Compressed, IoBuffer);
type Inflated = (Place, Result<Vec<u8>, Status>);

/// The thread that decompresses for a queue: started when first needed, exits when this is dropped.
pub struct Inflater {
    /// Wakes the queue; `None` to decompress on the thread of the caller.
    wake: Option<Arc<dyn Wake>>,
    thread: Option<(Sender<Job>, Receiver<Inflated>)>,
}

impl Inflater {
    pub fn new(wake: Option<Arc<dyn Wake>>) -> Inflater {
        Inflater { wake, thread: None }
    }

    /// Lets the thread decompress a cluster and then wake the queue. Returns the job if no thread can start.
    pub fn start(&mut self, job: Job) -> Result<(), Job> {
        // Simulation and fuzzing run in one thread, to be deterministic.
        let wake = self.wake.as_ref().filter(|_| !cfg!(any(simulation, fuzzing)));
        let Some(wake) = wake else { return Err(job) };
        let (jobs, _) = self.thread.get_or_insert_with(|| {
            let ((jobs, todo), (done, results)) = (channel::<Job>(), channel());
            let wake = Arc::clone(wake);
            let body = move || {
                while let Ok((place, compressed, read)) = todo.recv()
                    && done.send((place, compressed.inflate(&read))).is_ok()
                {
                    wake.wake();
                }
            };
            let builder = std::thread::Builder::new().name("blkq-inflate".to_owned()).stack_size(STACK_BYTES);
            // If no thread starts, the receiver is dropped, and sending fails.
            let _ = builder.spawn(body);
            (jobs, results)
        });
        jobs.send(job).map_err(|refused| {
            // The next cluster tries to start a thread again.
            self.thread = None;
            refused.0
        })
    }

    pub fn next(&self) -> Option<Inflated> {
        self.thread.as_ref()?.1.try_recv().ok()
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    const CLUSTER: usize = 64 << 10;

    fn inflate(zstd: bool, bytes: &[u8]) -> Result<Vec<u8>, Status> {
        let (file, data) = (0..bytes.len() as u64, 0..bytes.len());
        Compressed { file, data, zstd, cluster_bytes: CLUSTER }.inflate(bytes)
    }

    /// A zstd frame with a window of `1 << log` bytes. Each of its blocks repeats one byte.
    fn frame(log: u8, blocks: &[(u32, u8)]) -> Vec<u8> {
        let mut bytes = vec![0x28, 0xb5, 0x2f, 0xfd, 0, (log - 10) << 3];
        for (number, (length, byte)) in blocks.iter().enumerate() {
            let head = length << 3 | 1 << 1 | u32::from(number + 1 == blocks.len());
            bytes.extend(&head.to_le_bytes()[..3]);
            bytes.push(*byte);
        }
        bytes
    }

    #[test]
    fn a_zstd_frame_is_decompressed_whatever_follows_it() {
        let halves = [(CLUSTER as u32 / 2, 7), (CLUSTER as u32 / 2, 8)];
        let mut bytes = frame(16, &halves);
        bytes.extend([0xff; 300]);
        let content = inflate(true, &bytes).unwrap();
        assert_eq!(content, [vec![7; CLUSTER / 2], vec![8; CLUSTER / 2]].concat());
        // With a window larger than the cluster, the decoder holds all data back until the end of the frame.
        assert!(inflate(true, &frame(23, &halves)).is_ok());
    }

    // Contract: bounded-input
    #[test]
    fn malformed_frames_are_errors() {
        let whole = CLUSTER as u32;
        for bytes in [
            &b""[..],
            &frame(16, &[(whole - 1, 7)]),
            &frame(16, &[(whole, 7), (1, 7)]),
            &frame(24, &[(whole, 7)]),
            &frame(31, &[(whole, 7)]),
            &frame(16, &vec![(128 << 10, 7); 10_000]),
            &frame(23, &vec![(128 << 10, 7); 10_000]),
            &frame(16, &[(whole, 7)])[..9],
            &[0x50, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff],
        ] {
            assert_eq!(inflate(true, bytes), Err(Status::Io), "{:?}", &bytes[..bytes.len().min(16)]);
            assert_eq!(inflate(false, bytes), Err(Status::Io));
        }
    }
}
