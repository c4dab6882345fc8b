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
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::io::Read;

use crate::qcow2::format::header::Compression;
use crate::qcow2::tables::state::State;

/// Largest window of a zstd frame in bytes, which the decoder keeps in memory. RFC 8878 recommends that
/// decoders support at least this size; QEMU's frames have a window of one cluster.
const WINDOW_MAX_BYTES: u64 = 8 << 20;
const STACK_BYTES: usize = 256 << 10;

/// Where the compressed data of a cluster begins: the layer, and the byte of its file.
pub type Place = (u8, u64);

pub struct Compressed {
    buffer: IoBuffer,
    /// The bytes of `buffer` with the compressed data. The L2 entry counts whole sectors, so bytes of other
    /// data may follow.
    range: Range<usize>,
    method: Compression,
    cluster_bytes: usize,
}

impl Compressed {
    /// The bytes of the file to read for at most `bytes` bytes of compressed data at `host` of the file of
    /// `layer`, aligned for direct I/O, and how to make a cluster of a buffer with these bytes. Nothing is
    /// allocated, because the caller has locked `state`. Fails with [`Status::Io`] if the image is raw.
    pub fn place(
        state: &State,
        layer: u8,
        host: u64,
        bytes: u64,
    ) -> Result<(Range<u64>, impl FnOnce(IoBuffer) -> Compressed + use<>), Status> {
        let layer = usize::from(layer);
        let (header, align) = (&state.tables(layer).ok_or(Status::Io)?.header, state.layers[layer].align);
        let begin = host - host % align;
        let end = (host + bytes).next_multiple_of(align);
        let first = (host - begin) as usize;
        let range = first..first + bytes as usize;
        let (method, cluster_bytes) = (header.compression, header.cluster_bytes() as usize);
        Ok((begin..end, move |buffer| Compressed { buffer, range, method, cluster_bytes }))
    }

    /// Fails with [`Status::Io`] if the bytes are not the compressed data of a cluster.
    pub fn inflate(&self) -> Result<Vec<u8>, Status> {
        let (bytes, length) = (&self.buffer[self.range.clone()], self.cluster_bytes);
        let inflate = || match self.method {
            Compression::Deflate => inflate_deflate(bytes, length),
            Compression::Zstd => inflate_zstd(bytes, length),
        };
        // A decoder asserts properties of its input. A crafted image can break them, so a panic must not end the
        // process.
        catch_unwind(inflate).unwrap_or(Err(Status::Io))
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

fn inflate_zstd(mut compressed: &[u8], length: usize) -> Result<Vec<u8>, Status> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(WINDOW_MAX_BYTES);
    decoder.init(&mut compressed).map_err(|_| Status::Io)?;
    let (mut content, mut done) = (vec![0; length], 0);
    while !decoder.is_finished() {
        // One block (at most 128 KiB) at a time, because a frame may have any number of blocks and would else
        // grow without a limit in memory.
        let block = BlockDecodingStrategy::UptoBlocks(1);
        decoder.decode_blocks(&mut compressed, block).map_err(|_| Status::Io)?;
        done += decoder.read(&mut content[done..]).map_err(|_| Status::Io)?;
        if done == length {
            break;
        }
    }
    if done == length && decoder.can_collect() == 0 { Ok(content) } else { Err(Status::Io) }
}

type Job = (Place, Compressed);
type Inflated = (Place, Result<Vec<u8>, Status>);

/// The thread that decompresses for a queue: started when first needed, exits when this is dropped.
pub struct Inflater {
    wake: Arc<dyn Wake>,
    thread: Option<(Sender<Job>, Receiver<Inflated>)>,
}

impl Inflater {
    pub fn new(wake: Arc<dyn Wake>) -> Inflater {
        Inflater { wake, thread: None }
    }

    /// Lets the thread decompress a cluster and then wake the queue. Returns the cluster if no thread can
    /// start.
    pub fn start(&mut self, place: Place, compressed: Compressed) -> Result<(), Compressed> {
        if cfg!(any(simulation, fuzzing)) {
            // Simulation and fuzzing run in one thread, to be deterministic.
            return Err(compressed);
        }
        let wake = &self.wake;
        let (jobs, _) = self.thread.get_or_insert_with(|| {
            let ((jobs, todo), (done, results)) = (channel(), channel());
            let wake = Arc::clone(wake);
            let body = move || work(&todo, &done, &*wake);
            let builder = std::thread::Builder::new().name("blkq-inflate".to_owned()).stack_size(STACK_BYTES);
            // If no thread starts, the receiver is dropped, and sending fails.
            let _ = builder.spawn(body);
            (jobs, results)
        });
        jobs.send((place, compressed)).map_err(|refused| {
            // The next cluster tries to start a thread again.
            self.thread = None;
            refused.0.1
        })
    }

    pub fn next(&self) -> Option<Inflated> {
        self.thread.as_ref()?.1.try_recv().ok()
    }
}

fn work(todo: &Receiver<Job>, done: &Sender<Inflated>, wake: &dyn Wake) {
    while let Ok((place, compressed)) = todo.recv() {
        if done.send((place, compressed.inflate())).is_err() {
            return;
        }
        wake.wake();
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    const CLUSTER: usize = 64 << 10;

    fn inflate(method: Compression, bytes: &[u8]) -> Result<Vec<u8>, Status> {
        let mut buffer = IoBuffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        Compressed { buffer, range: 0..bytes.len(), method, cluster_bytes: CLUSTER }.inflate()
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
        let content = inflate(Compression::Zstd, &bytes).unwrap();
        assert_eq!(content, [vec![7; CLUSTER / 2], vec![8; CLUSTER / 2]].concat());
        // With a window larger than the cluster, the decoder holds all data back until the end of the frame.
        assert!(inflate(Compression::Zstd, &frame(23, &halves)).is_ok());
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
            assert_eq!(
                inflate(Compression::Zstd, bytes),
                Err(Status::Io),
                "{:?}",
                &bytes[..bytes.len().min(16)]
            );
            assert_eq!(inflate(Compression::Deflate, bytes), Err(Status::Io));
        }
    }
}
