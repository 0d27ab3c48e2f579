"""Tables of `benchmarks.decode`: how fast media are decoded, what that holds in memory, and who waits for whom."""

from __future__ import annotations

from typing import Any

VIDEO = "480p H.264, 10 s, {num_frames} frames to {side_px} px, a key frame every {gop} frames"
RUNS = {
    "configured": "`auto`, replaced as configured",
    "decord_never_replaced": "`decord`, never replaced",
    "pyav_never_replaced": "`pyav`, never replaced",
}


def throughput_table(results: dict[str, Any]) -> str:
    """Rows per second of CPU time."""
    found = results["throughput"]
    lines = ["| what | decoder | rows per second and core |", "|---|---|---|"]
    for name, cell in found["cells"].items():
        place, _, decoder = name.partition("/")
        what = f"640 × 480 JPEG to {found['side_px']} px"
        if decoder:
            what = VIDEO.format(**found, gop=place.rpartition("_")[2])
        lines.append(f"| {what} | {f'`{decoder}`' if decoder else 'Pillow'} | {cell['rows_per_cpu_s']:.1f} |")
    return "\n".join(lines)


def memory_table(results: dict[str, Any]) -> str:
    """Peaks of resident memory."""
    lines = [
        "| decoders' process | videos | clips | processes | its peak, first 100 | its peak after "
        "| the task's own peak, first 100 | and after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in results["memory"]["runs"].items():
        peaks = ("peak_mib_first_100", "peak_mib_after", "parent_peak_mib_first_100", "parent_peak_mib_after")
        told = " | ".join(f"{run[peak]:.0f} MiB" for peak in peaks)
        lines.append(
            f"| {RUNS[name]} | {run['num_videos']:,} | {run['num_clips']:,} | {run['num_processes']} | {told} |"
        )
    return "\n".join(lines)


def waits_table(results: dict[str, Any]) -> str:
    """Shares of the actor's time."""
    lines = ["| actor's rate | rows | actor waited for input | input waited for the actor |", "|---|---|---|---|"]
    for name, cell in results["waits"]["cells"].items():
        share = name.removeprefix("actor_at_").removesuffix("_of_the_limit")
        waited = f"{100 * cell['actors_waited_share']:.1f} % | {100 * cell['input_waited_share']:.1f} %"
        lines.append(f"| {share} of what one decoder gives | {cell['num_rows']} | {waited} |")
    return "\n".join(lines)


TABLES = {"decode_throughput": throughput_table, "decode_memory": memory_table, "decode_waits": waits_table}
