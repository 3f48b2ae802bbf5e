from argparse import Namespace

def main(args: Namespace) -> None:
    """Converts one checkpoint; writes ``latest_universal`` beside the folder that it fills."""
