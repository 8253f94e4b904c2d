"""What a run leaves on disk, its logs, its signals: the ground that every room stands on."""
